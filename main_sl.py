"""`python main_sl.py --config-file config.yaml`: `oxrl train`, which goes by the algorithm that the file names."""

from __future__ import annotations

import argparse
import sys

from oxrl.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config-file", required=True, help="YAML file; further flags are those of `oxrl train`")
    known, further = parser.parse_known_args()
    sys.argv[1:] = ["train", known.config_file, *further]
    main()
