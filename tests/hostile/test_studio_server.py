"""The studio's server: other pages on this computer's browser cannot use it."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("gradio", reason="the extra `studio` is not installed")

from dear.studio.app import LocalOnly


def answer(local: bool, **headers: str) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers that a request with these headers gets."""
    sent: list[dict] = []

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    asyncio.run(LocalOnly(app, local=local)(scope, None, send))
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:7860", "localhost", "[::1]:7860", "127.0.0.2"])
def test_this_computer_is_served(host: str) -> None:
    status, headers = answer(True, host=host, origin=f"http://{host}")
    assert status == 200
    assert b"default-src 'self'" in headers[b"content-security-policy"]
    assert answer(True, host=host)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:7860"},  # a name that was made to point at this computer
        {"host": "127.0.0.1.evil.example"},
        {"host": ""},
        {"host": "["},  # no address at all
        {"host": "127.0.0.1:7860", "origin": "https://evil.example"},  # a page elsewhere that posts here
        {"host": "127.0.0.1:7860", "origin": "null"},
        {"host": "evil.example@127.0.0.1.evil.example"},
    ],
)
def test_other_names_and_other_pages_are_not(headers: dict[str, str]) -> None:
    assert answer(True, **headers)[0] == 403


def test_a_studio_for_others_is_for_others() -> None:
    assert answer(False, host="studio.example", origin="https://studio.example")[0] == 200


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("headers", [{"host": "["}, {"host": "localhost", "origin": "http://["}])
def test_an_address_that_is_none_is_refused(local: bool, headers: dict[str, str]) -> None:
    assert answer(local, **headers)[0] == 403
