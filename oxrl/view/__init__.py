"""A local page over the folders of runs: `oxrl view RUN`. It reads what a run writes, and writes nothing there."""
