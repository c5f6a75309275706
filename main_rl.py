"""`python main_rl.py --config-file config.yaml`: `oxrl train`, which goes by the algorithm that the file names."""

from oxrl.cli import main_with_config_file

if __name__ == "__main__":
    main_with_config_file(__doc__)
