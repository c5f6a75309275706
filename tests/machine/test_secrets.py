"""What looks like a secret is removed from texts and refused in configs; what does not stays."""

import logging

import pytest

from oxrl.config import Config, ConfigError, check_config
from oxrl.config.load import load_config
from oxrl.machine.secrets import secrets_in, without_secrets
from oxrl.tracking.logs import set_up_logging
from tests.clock import no_hang

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
KEYS = {  # shapes of keys, none of them real
    "AWS": "AKIA" + "ABCDEFGH12345678",
    "AWS session": "ASIA" + "ABCDEFGH12345678",
    "Google": "AIza" + "SyD-" + LETTERS[:31],
    "Google OAuth": "ya29." + LETTERS,
    "GitHub": "ghp_" + LETTERS,
    "GitLab": "glpat-" + LETTERS[-20:],
    "npm": "npm_" + LETTERS,
    "PyPI": "pypi-AgEI" + LETTERS,
    "OpenAI": "sk-proj-" + LETTERS,
    "Stripe": "sk_live_" + LETTERS,
    "Groq": "gsk_" + LETTERS,
    "Slack": "xoxb-123456789012-" + LETTERS,
    "Hugging Face": "hf_" + LETTERS[:30],
    "a web token": f"eyJ{LETTERS}.{LETTERS}.{LETTERS}",
    "PEM": f"-----BEGIN RSA PRIVATE KEY-----\n{LETTERS}\n{LETTERS}\n-----END RSA PRIVATE KEY-----",
    "PEM without its end": f"-----BEGIN PRIVATE KEY-----\n{LETTERS}",
    "a password in a URL": "https://ada:p@ss-wörd@host.example/path",
}
NAMED = {
    "a cookie": ("Cookie: session=abcdef; theme=dark", "Cookie: [removed]"),
    "a cookie that is set": ("set-cookie: id=abcdef; Path=/\nnext", "set-cookie: [removed]\nnext"),
    "basic authentication": ("Authorization: Basic YWRhOnB3", "Authorization: Basic [removed]"),
    "a quoted password with a space": ('password: "correct horse"', 'password: "[removed]"'),
    "escaped JSON": (r"{\"api_key\": \"abcdefgh\"}", r"{\"api_key\": \"[removed]\"}"),
    "an AWS secret": ("aws_secret_access_key = AbCd/EfGh+1234", "aws_secret_access_key = [removed]"),
    "an Azure account": ("AccountName=me;AccountKey=aB3+/dEf==;A=b", "AccountName=me;AccountKey=[removed];A=b"),
    "an Azure address": ("https://x.example/c?sv=1&sig=aB3%2Fdef456", "https://x.example/c?sv=1&sig=[removed]"),
    "a database": ("Server=db;Uid=me;Pwd=swordfish;", "Server=db;Uid=me;Pwd=[removed];"),
    "a bearer": ("authorization: bearer aB3dEf456789", "authorization: bearer [removed]"),
    "a bearer in JSON": ('{"Authorization": "Bearer aB3dEf4567"}', '{"Authorization": "Bearer [removed]"}'),
    "a bearer in escaped JSON": (
        r"{\"Authorization\": \"Bearer aB3dEf4567\"}",
        r"{\"Authorization\": \"Bearer [removed]\"}",
    ),
    "a bearer without its header": ("sent Bearer aB3dEf456789 to", "sent Bearer [removed] to"),
    "a proxy": ("Proxy-Authorization: Basic YWRhOnB3", "Proxy-Authorization: Basic [removed]"),
    "a digest": ('Authorization: Digest username="me", response="ab"\nx', "Authorization: Digest [removed]\nx"),
    "another scheme": ("Authorization: Negotiate YIIaB3", "Authorization: Negotiate [removed]"),
    "auth": ("auth: aB3dEf456", "auth: [removed]"),
    "auth with a user": ("http_auth=ada:lovelace", "http_auth=[removed]"),
    "auth in code": ("get(url, auth=('ada', 'pw'))", "get(url, auth=[removed])"),
    "auth in JSON": ('{"auth": "aB3dEf456"}', '{"auth": "[removed]"}'),
    "a signed address": ("https://host/x?X-Amz-Signature=abcdef&n=1", "https://host/x?X-Amz-Signature=[removed]&n=1"),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_is_removed_from_a_text_and_found_in_a_config(kind):
    key = KEYS[kind]
    removed = without_secrets(f"before {key} after", {})
    assert not any(part in removed for part in (LETTERS[:20], LETTERS[-15:], "12345678", "p@ss", "ss-w"))
    assert "before " in removed
    assert list(secrets_in({"reward": {"params": {"note": [f"use {key}"]}}})) == ["reward.params.note.0"]


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_named_as_a_secret_is_removed(kind):
    text, expected = NAMED[kind]
    assert without_secrets(text, {}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "auth: disabled",
        "auth=none, mode=oauth",
        "auth: https://login.example:8080/start",
        "author: Ada Lovelace 1843",
        "RAY_AUTH_MODE=disabled",
        "the bearer of this letter, born 1815",
        "max_tokens=256 pad_token: <pad> tokens_per_second 512.5",
        "assert sig == 3 and f(x)&mask",
        "step 12  reward 0.125  loss 3.5e-09",
        "KeyError: 'answer' in rows.jsonl:12",
        "model: me/author-12b; data: hf://datasets/me/basic-auth-questions",
    ],
)
def test_ordinary_texts_stay(text):
    assert without_secrets(text, {}) == text


@pytest.mark.parametrize(
    "part", ["a-", "a_", "sk-", "auth=", "auth=(a", "eyJaaaaaaaa-", "?sig=", "bearer ", "x://a@", ";pwd="]
)
def test_long_texts_are_searched_in_linear_time(part):
    with no_hang():
        without_secrets(part * 50_000, {})


def test_values_of_secret_variables_are_removed_and_plain_words_are_not():
    environ = {"DB_PASSWORD": "swordfish", "RAY_AUTH_MODE": "disabled", "SSH_AUTH_SOCK": "/tmp/agent", "PAGER": "less"}
    text = "swordfish disabled /tmp/agent less"
    assert without_secrets(text, environ) == "[DB_PASSWORD removed] disabled /tmp/agent less"


@pytest.mark.parametrize(
    "name",
    ["api_key", "openai-api-key", "password", "hf_token", "token", "Authorization", "Proxy-Authorization", "SECRET"],
)
def test_a_key_of_a_config_that_is_named_as_a_secret_is_found(name):
    assert list(secrets_in({"params": {name: "x"}})) == [f"params.{name}"]
    assert list(secrets_in({"params": {name: 123456}})) == [f"params.{name}"]
    assert list(secrets_in({"params": {name: None}, "others": {name: True, f"{name}_env": "OPENAI_API_KEY"}})) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auth", "aB3dEf456"),
        ("basic_auth", "ada:lovelace"),
        ("headers", "Authorization: Bearer aB3dEf456789"),
        ("headers", "Authorization: Basic YWRhOnB3"),
        ("connection", "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=aB3+/dEf4567=="),
        ("tracking_uri", "Server=db;Uid=me;Pwd=swordfish;"),
        ("train_files_path", "https://x.blob.example/rows.jsonl?sv=1&sig=aB3%2Fdef456"),
        ("val_files_path", "https://x.s3.example/rows.jsonl?X-Amz-Date=1&X-Amz-Signature=0123456789abcdef"),
    ],
)
def test_other_secrets_in_values_of_a_config_are_found(key, value):
    assert list(secrets_in({"params": {key: value}})) == [f"params.{key}"]


def test_ordinary_values_of_a_config_are_no_secrets():
    config = {
        "model": {"name": "Qwen/Qwen2.5-7B-Instruct", "revision": "89abcdef0123456789abcdef0123456701234567"},
        "data": {
            "train_files_path": "hf://datasets/me/my-sk-learn-questions-and-answers",
            "columns": {"answer": "key"},
        },
        "rollout": {"max_tokens": 256, "stop": ["</answer>", "Password:"]},
        "inference_engine": {"urls": ["http://127.0.0.1:8000", "unix:///tmp/engine/socket"], "pad_token": "<pad>"},
        "judge": {
            "auth": "basic",
            "oauth": "none",
            "author": "Ada Lovelace 1843",
            "auth_env": "JUDGE_AUTH",
            "auth_mode": "x",
        },
        "login": {"auth": "https://login.example/start", "sig": "abc", "bearer": "Bearer of news"},
        "reward": {"rubric": "Does the answer mention the secret token: yes or no? mail me@host.example"},
    }
    assert list(secrets_in(config)) == []


SECTIONS = {"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}}


@pytest.mark.parametrize("make", [check_config, Config.model_validate])
def test_a_config_with_a_secret_is_refused_without_showing_it(make):
    reward = {"reward_func": "my.py:judge", "params": {"api_key": KEYS["OpenAI"]}}
    with pytest.raises(ValueError, match=r"reward\.params\.api_key looks like a secret.*api_key_env") as refused:
        make({**SECTIONS, "reward": reward})
    assert LETTERS[:10] not in str(refused.value)
    assert make({**SECTIONS, "reward": {**reward, "params": {"api_key_env": "OPENAI_API_KEY"}}})


def test_an_override_with_a_secret_is_refused_without_showing_it():
    for override in (f"reward.params.api_key={KEYS['OpenAI']}", KEYS["OpenAI"], f"reward.params.x=[{KEYS['OpenAI']}"):
        with pytest.raises(ConfigError) as refused:
            load_config(None, [override])
        assert LETTERS[:10] not in str(refused.value)


def test_logs_show_no_secret(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    set_up_logging()
    root.warning("cannot open %s", "https://ada:secret@host/x")
    assert capsys.readouterr().err == "cannot open https://[removed]@host/x\n"
