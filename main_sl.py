"""`python main_sl.py --config-file config.yaml`: the same as `oxrl train config.yaml`, for any algorithm."""

from oxrl.cli import main_with_config_file

if __name__ == "__main__":
    main_with_config_file(__doc__)
