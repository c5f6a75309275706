"""The checks of a run while it trains: `table` lists them, `monitor` runs them, `findings` keeps what they found."""
