"""What somebody who runs the service sees: log lines, refusals, figures, threads."""

from __future__ import annotations

import asyncio
import json
import logging
import time

from starlette.requests import ClientDisconnect
from test_service import client_of, file, wait_for

from dear.cli.serve import _show_log
from dear.runs.folder import add_metrics
from dear.serve.guard import Guard
from dear.serve.metrics import Metrics
from dear.serve.settings import Limits


def test_a_client_that_goes_away_is_no_failure_of_the_service(caplog):
    metrics = Metrics()

    async def app(scope, receive, send):
        raise ClientDisconnect

    scope = {"type": "http", "path": "/", "method": "POST", "headers": []}
    with caplog.at_level("INFO", logger="dear.serve"):
        asyncio.run(Guard(app, Limits(), metrics)(scope, None, None))
    assert [json.loads(record.message)["status"] for record in caplog.records] == [499]
    assert all(record.exc_info is None for record in caplog.records)


def test_the_frameworks_own_refusals_are_sentences(runs):
    with client_of(runs) as client:
        assert client.get("/nothing").json() == {
            "error": "nothing is at /nothing; /docs describes the addresses"
        }
        reply = client.get("/v1/models/probe/classify")
        assert (reply.status_code, "does not take GET" in reply.json()["error"]) == (405, True)


def test_a_model_names_the_figures_of_its_evaluations(runs):
    add_metrics(runs / "probe", **{"evaluation of colors (test)": {"accuracy": {"default": 0.5}}})
    with client_of(runs) as client:
        figures = client.get("/v1/models/probe").json()["figures"]
    assert figures == {"evaluation of colors (test)": {"accuracy": {"default": 0.5}}}


def test_a_run_that_breaks_while_it_is_served_is_logged_once(runs, caplog):
    with caplog.at_level("WARNING", logger="dear.serve"), client_of(runs) as client:
        (runs / "probe" / "config.json").write_text("{broken", encoding="utf-8")
        wait_for(lambda: caplog.records)
        time.sleep(0.3)  # several looks at the folder
        assert client.post("/v1/models/probe/classify", files=[file(1)]).status_code in (200, 409)
    (line,) = [json.loads(record.message) for record in caplog.records]
    assert line["adapter"] == "probe"
    assert "config.json" in line["not served"]


def test_every_log_line_is_printed_once(capsys):
    """The command line prints the library's notes by a handler of its own, too."""
    loggers = [logging.getLogger(name) for name in ("dear", "dear.serve", "uvicorn")]
    before = [(log, list(log.handlers), log.propagate, log.level) for log in loggers]
    try:
        loggers[0].addHandler(logging.StreamHandler())
        _show_log()
        logging.getLogger("dear.serve").info("a line")
        logging.getLogger("uvicorn.error").info("not shown")
    finally:
        for log, handlers, propagate, level in before:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
    assert capsys.readouterr().err == "a line\n"
