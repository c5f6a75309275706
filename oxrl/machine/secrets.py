"""Secrets in texts and configs: remove what looks like one, and find the keys that hold one.

A config is copied to the run folder, to trackers and to reports, so `oxrl.config` refuses secrets in it; errors, logs,
failure records and bug reports pass through `without_secrets`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of environment variables whose values are not shown."""
_SURELY_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASS|PASSWD|PASSWORD|CREDENTIALS?)(_ID)?$", re.IGNORECASE)
_MIN_LENGTH = 6  # of a value of a variable
# Texts contain what models write. Quantifiers are bounded where a long run would be searched again from each character.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl[a-z]{2,5}-[\w-]{20,}"
    r"|sk-(?=[\w-]{0,99}?\d)[\w-]{20,}|[sr]k_(?:live|test)_\w{10,}|gsk_\w{20,}|xai-\w{20,}|r8_\w{20,}"
    r"|wandb_v1_\w{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|eyJ[\w-]{8,999}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_IN_URL = re.compile(r"(\w://)[^/\s\"'@]+(?:@[^/\s\"'@]+)*@")
_SCHEME = r"(?:bearer|basic|token|apikey|negotiate|ntlm|digest|oauth|hawk|aws4-hmac-sha256)\s+"
_PREFIXED = re.compile(  # values that follow what only precedes a secret, wherever they are
    r"""(?ix) ( \b(?:account|sharedaccess)key= | [?&](?:sig|x-(?:amz|goog)-signature)= | \bbearer\s+ )
        (?=[^\s;&"'\\]{0,99}?\d) [\w.~+/%=-]{10,}
    | ( \bauthorization:\s*"""
    + _SCHEME
    + r""" | ;\s*(?:password|pwd)= ) [^\s;"'\\]{4,}"""
)
_NAMED = re.compile(
    r"""(?ix) ( (?: (?:api|access|secret|private|account)[_-]?key | token | secret | passw(?:or)?d | passphrase
        | authorization | credentials? | amz-signature )
        \\?["']? \s*[:=]\s* (?:\\?["'](?="""
    + _SCHEME
    + r"""))? (?:"""
    + _SCHEME
    + r""")?+ )
    (\\?["'])? (?!null\b|none\b|true\b|false\b|[\[<]) (?(2)[^"'\\\n]{4,}|[^\s"'\\,;&}\]]{4,})"""
)
_AUTH = re.compile(  # `auth: disabled` and addresses stay
    r"""(?ix) ( auth \\?["']? \s*[:=]\s* (?:\\?["'])? (?:"""
    + _SCHEME
    + r""")?+ ) (?!https?:|[/\[])
    (?: \( [^)\n]{4,200} \) | (?=[^\s"'\\,;&}\]]{0,99}?\d) [^\s"'\\,;&}\]]{8,}
      | [^\s"'\\,;&}\]:]{1,99} : [^\s"'\\,;&}\]]{4,} )"""
)
_REST_OF_LINE = re.compile(  # headers with several values
    r"(?i)(\b(?:set-)?cookie[\"']?\s*[:=]\s*"
    r"|\bauthorization[\"']?\s*[:=]\s*[\"']?(?:digest|oauth|hawk|aws4-hmac-sha256)\s+)[^\r\n]{4,}"
)
_SECRET_KEY = re.compile(
    r"(?ix) .*(?: (?:api|access|secret|private|account)[_-]?key | secret | passw(?:or)?d | passphrase | authorization"
    r" | (?:access|auth|api|bearer|session|hf|hub|github)[_-]?token ) | token | cookie | credentials?"
)
_AUTH_KEY = re.compile(r"(?i)(?:.*[_-])?auth")


def without_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the text without values of secret variables, keys, cookies, passwords in URLs and what is named so."""
    secrets = {value: name for name, value in environ.items() if _is_secret(name, value)}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"[{secrets[value]} removed]")
    text = _IN_URL.sub(r"\1[removed]@", text)
    text = _REST_OF_LINE.sub(r"\1[removed]", text)
    text = _SHAPES.sub("[removed]", text)
    text = _NAMED.sub(lambda found: f"{found[1]}{found[2] or ''}[removed]", text)
    text = _PREFIXED.sub(lambda found: f"{found[1] or found[2]}[removed]", text)
    return _AUTH.sub(r"\1[removed]", text)


def secrets_in(config: Any, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the keys whose values look like secrets: `"reward.params.api_key"`."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from secrets_in(value, (*above, str(key)))
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from secrets_in(value, (*above, str(index)))
    elif isinstance(config, str | int | float) and not isinstance(config, bool) and config != "":
        named = bool(above) and (_SECRET_KEY.fullmatch(above[-1]) or _is_auth(above[-1], config))
        shapes = (_SHAPES, _IN_URL, _PREFIXED)
        if named or (isinstance(config, str) and any(shape.search(config) for shape in shapes)):
            yield ".".join(above)


def _is_auth(key: str, value: object) -> bool:
    """`auth: basic` names a method, `auth: ada:lovelace` is a secret."""
    return (
        isinstance(value, str)
        and bool(_AUTH_KEY.fullmatch(key))
        and not re.fullmatch(r"[a-z0-9_-]{1,9}|https?://.*", value)
    )


def _is_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret, not a word such as `RAY_AUTH_MODE=disabled` or a path."""
    if len(value) < _MIN_LENGTH or not SECRET_NAME.search(name):
        return False
    return bool(_SURELY_SECRET.search(name)) or not re.fullmatch(r"[a-z]+|/.*", value)
