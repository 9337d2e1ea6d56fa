"""Options of `serve` about browsers and TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

PANEL = "Browsers and TLS"

OriginsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origins",
        metavar="ORIGIN",
        help="Origins whose pages may use the server, * for all; several times, or a JSON list. Default: those of this "
        "machine, all with --api-key.",
        rich_help_panel=PANEL,
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option("--allowed-methods", metavar="METHOD", help="Of such pages. Default: all.", rich_help_panel=PANEL),
]
HeadersOption = Annotated[
    list[str] | None,
    typer.Option("--allowed-headers", metavar="HEADER", help="Of such pages. Default: all.", rich_help_panel=PANEL),
]
CredentialsOption = Annotated[
    bool,
    typer.Option(
        "--allow-credentials/--no-allow-credentials", help="Let such pages send cookies.", rich_help_panel=PANEL
    ),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option("--ssl-certfile", metavar="FILE", help="Certificate (PEM): serve HTTPS.", rich_help_panel=PANEL),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--ssl-keyfile", metavar="FILE", help="Its key, if it is not in there.", rich_help_panel=PANEL),
]
LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")  # parameters with several values


def several(option: str, given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Values of an option that may be given several times, each one value or, as vLLM has it, a JSON list of them; None
    if it was not given. Raises ConfigError."""
    from paceline.errors import ConfigError

    if not given:
        return None
    values: list[str] = []
    for text in given:
        found = [text]
        if text.lstrip().startswith("["):
            try:
                found = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{option} {text[:60]}: no JSON list ({error})") from None
        if not all(isinstance(value, str) and value.strip() for value in found):
            raise ConfigError(f"{option} {text[:60]}: use a value such as '*', or a JSON list of them")
        values += [value.strip() for value in found]
    return tuple(values)


def origins(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """`--allowed-origins`. Raises ConfigError for what is no origin, which would match none."""
    from paceline.errors import ConfigError

    values = several("--allowed-origins", given)
    for value in values or ():
        scheme, found, host = value.partition("://")
        if value not in ("*", "null") and not (scheme and found and host and "/" not in host):
            raise ConfigError(f"--allowed-origins {value[:60]}: write https://host, with :port if it has one, or *")
    return values


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises ConfigError unless they can be used, before anything large is loaded."""
    from paceline.errors import ConfigError

    if certificate is None:
        if key is not None:
            raise ConfigError(f"--ssl-keyfile {key}: needs --ssl-certfile")
        return
    shown = f"--ssl-certfile {certificate}" + (f" --ssl-keyfile {key}" if key is not None else "")
    try:
        # no prompt for a passphrase: a service has nobody to answer it
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(f"{shown}: {error.strerror if isinstance(error, FileNotFoundError) else error}") from None
