"""HTTPS: a process with a certificate, whose streams come whole."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from .harness import joined, parse_events
from .test_serve_command import start

# Of nobody: made for this test, for localhost and 127.0.0.1, until 2126.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmjCCAUGgAwIBAgIUTo0mNsp0cqSjHlOXf6xek6XfYEgwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTIwMTE2NDcwMFoYDzIxMjYxMTA3
MTY0NzAwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQ49aP4TlJtD+UTVCYkbnxd5rl7Zg9LvOTTQWN8kNqzUwwOGa/TFFY6
G0AUo8MpBcq25pBBzX7NwwG/caSu6hMko28wbTAdBgNVHQ4EFgQUx7S3rUcNZCEO
yQqBBOg/VGgS+LwwHwYDVR0jBBgwFoAUx7S3rUcNZCEOyQqBBOg/VGgS+LwwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDRwAwRAIgVbV2p5AcjAiy7sXldzKDrGHUA2uzjBjcTzshCFLKHP4CIF4N
qXKFeRstHj+eUa7UQLcM/dSj699ck7WBHUNqMSvV
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgEv4VYEJFvscBIu8a
Bxhv5KQ+Im3HXIOK4LewdmI9I8mhRANCAAQ49aP4TlJtD+UTVCYkbnxd5rl7Zg9L
vOTTQWN8kNqzUwwOGa/TFFY6G0AUo8MpBcq25pBBzX7NwwG/caSu6hMk
-----END PRIVATE KEY-----
"""


def test_a_server_with_a_certificate(folder: Path, tmp_path: Path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(KEY)
    config = tmp_path / "serve.yaml"
    config.write_text(f"ssl-certfile: {certificate}\nssl-keyfile: {key}\nallowed-origins: ['https://a.example']\n")
    process, url, _ = start(str(folder), "--config", str(config), "--port", "0", "--max-model-len", "160")
    try:
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=url, verify=trusted, timeout=600) as client:
            ask = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
            whole = client.post("/v1/completions", json=ask).json()["choices"][0]
            headers = {"origin": "https://a.example"}
            with client.stream("POST", "/v1/completions", json={**ask, "stream": True}, headers=headers) as answer:
                assert answer.headers["access-control-allow-origin"] == "https://a.example"
                assert joined(parse_events(answer.iter_lines()))["text"] == whole["text"]
            assert client.get("/v1/embeddings").status_code == 404
            process.terminate()  # the client's connection stays open and idle: nobody takes leave under TLS
            process.wait(600)
    finally:
        process.terminate()
        rest = process.stderr.read()
        process.stderr.close()
    assert process.wait(600) == 0, rest
    assert "Traceback" not in rest
