import pytest
import yaml

from oxrl.config import ConfigError, check_config, load_config

GOOD = """\
model:
  name: tiny
train:
  alg_name: SFT
  lr: 1e-5
data:
  train_files_path: rows.jsonl
"""


def written(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_a_minimal_file_loads_and_everything_else_has_a_default(tmp_path):
    config = load_config(written(tmp_path, GOOD))
    assert config.train.lr == 1e-5, "YAML 1.1 would read 1e-5 as text"
    assert config.train.alg_name == "sft"
    assert config.data.train_files == {"rows": "rows.jsonl"}


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("  lr: 1e-5", "  learning_rate: 1e-5", "line 5: train.learning_rate is not a key"),
        ("  lr: 1e-5", "  l: 1e-5", "did you mean lr?"),
        ("  lr: 1e-5", "  lr: fast", "line 5: train.lr"),
        ("  lr: 1e-5", "  lr: -1.0", "greater than 0"),
        ("  alg_name: SFT", "  alg_name: sfd", "did you mean sft?"),
        ("  name: tiny", "  name: tiny\n  dtype: float8", "float32"),
        ("train:", "trane:", "did you mean train?"),
        ("  train_files_path: rows.jsonl", "  {}", "data.train_files_path is missing"),
        ("  name: tiny", "  name: [", "not valid YAML"),
    ],
)
def test_a_mistake_is_answered_with_its_line_and_what_is_allowed(tmp_path, line, instead, message):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, GOOD.replace(line, instead)))
    assert message in str(caught.value)


def test_a_missing_file_names_one_that_is_there(tmp_path):
    written(tmp_path, GOOD)
    with pytest.raises(ConfigError, match="did you mean config.yaml"):
        load_config(tmp_path / "confg.yaml")


def test_overrides_are_laid_over_the_file(tmp_path):
    config = load_config(written(tmp_path, GOOD), ["train.lr=3e-4", "lora.enabled=true", "data.columns={response: a}"])
    assert (config.train.lr, config.lora.enabled, config.data.columns) == (3e-4, True, {"response": "a"})
    with pytest.raises(ConfigError, match="looks like"):
        load_config(written(tmp_path, GOOD), ["lr 3"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train_files_path": "a.jsonl", "train_dnames": ["a", "b"]}, "different datasets"),
        ({"train_files_path": {"a": "a.jsonl"}, "train_ratios": {"b": 1.0}}, "exactly the datasets"),
    ],
)
def test_datasets_and_their_names_must_agree(data, message):
    with pytest.raises(ConfigError, match=message):
        check_config({"model": {"name": "tiny"}, "data": data})


def test_a_config_survives_being_written_and_read():
    config = check_config({"model": {"name": "tiny"}, "data": {"train_files_path": "a.jsonl"}})
    assert check_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config
