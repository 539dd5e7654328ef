"""What the page of `nanogpt watch` is given: everything once, then only what is new, to this machine alone."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from nanogpt_cli.errors import UserError
from nanogpt_cli.runs.directory import list_runs
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.view.watch import MOST_POINTS, SHOWN_FIRST, Server, page, state
from tests.view.made import grow, make_run

Get = Callable[..., http.client.HTTPResponse]


@contextlib.contextmanager
def serving(root: Path) -> Iterator[int]:
    """The port of a server for the runs in `root`."""
    pytest.importorskip("plotly")
    with Server(lambda: list_runs(root), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def get(tmp_path: Path) -> Iterator[Get]:
    """Ask a server for the runs in `tmp_path`."""
    with serving(tmp_path) as port:

        def ask(path: str, host: str = f"127.0.0.1:{port}", method: str = "GET") -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request(method, path, headers={"Host": host})
            return connection.getresponse()

        yield ask


def test_the_first_look_has_everything_and_later_ones_what_is_new(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x")
    (first,) = state([run])
    assert first["train"]["step"] == list(range(1, 41))
    assert first["val"]["step"] == [10, 20, 30, 40]
    assert first["facts"]["settings"]["max_iters"] == "40"
    assert first["facts"]["tokenizer"] == "bytes"
    assert [sample["text"] for sample in first["samples"]] == [f"To be, or not {step}" for step in (10, 20, 30, 40)]
    grow(run, 41, 43)
    with run.metrics.open("a") as file:
        file.write('{"step": 44, "lo')  # a line that is being written
    (later,) = state([run], {str(run.path): first["read"]})
    assert later["train"]["step"] == [41, 42, 43]
    assert later["val"]["step"] == []
    assert later["facts"] is None
    (again,) = state([run], {str(run.path): later["read"]})
    assert again["train"]["step"] == []
    assert again["read"] == later["read"]


def test_a_file_that_a_resume_has_written_anew_is_sent_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x")
    (first,) = state([run])
    log = MetricsLog(run.metrics)
    log.keep_through(20, 20)
    log.close()
    (later,) = state([run], {str(run.path): first["read"]})
    assert later["train"]["step"] == list(range(1, 21))
    assert later["facts"] is not None


@pytest.mark.parametrize("place", ["nonsense", "1:-5", "1:99999999999", ":", "²:²"])
def test_a_place_that_is_none_is_the_beginning(tmp_path: Path, place: str) -> None:
    run = make_run(tmp_path / "x", count=3)
    assert state([run], {str(run.path): place})[0]["train"]["step"] == [1, 2, 3]


def test_a_long_run_comes_in_as_many_points_as_a_screen_shows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", count=0)
    with run.metrics.open("w") as file:
        file.writelines(
            json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(1, 3 * MOST_POINTS + 1)
        )
    (seen,) = state([run])
    assert len(seen["train"]["step"]) == MOST_POINTS
    assert seen["train"]["loss"][:2] == [2, 5], "neighbours are averaged"
    assert seen["train"]["lr"][0] is None


def test_of_many_runs_the_newest_are_shown_first_and_the_others_when_asked_for(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{number}", count=1) for number in range(SHOWN_FIRST + 2)]
    assert [("train" in one) for one in state(runs)].count(True) == SHOWN_FIRST
    asked = state(runs, {str(runs[0].path): ""})
    assert [one["name"] for one in asked if "train" in one] == ["run-0"]
    assert len(asked) == len(runs)


def test_damage_and_numbers_beyond_all_measure_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", count=2)
    run.config.write_text("[derived]\nbytes_per_token = -1\nflops_per_token = true\n[x]\nwhen = 2020-01-01\n")
    run.environment.write_bytes(b"\xff")
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "loss": 1' + "0" * 400 + '}\n{"step": 4, "loss": "4"}\n[]\n{"step": "5", "loss": 5}\n')
    run.samples.write_bytes(b'{"step": 1}\n\xff\n{"step": 2, "text": 5}\n')
    (seen,) = json.loads(json.dumps(state([run]), allow_nan=False))
    assert seen["train"]["loss"][2:] == [None, None]
    assert seen["facts"]["bytes_per_token"] is None
    assert seen["facts"]["settings"]["when"] == "2020-01-01"


def test_the_server_answers_to_this_machine_alone_with_the_page_and_the_data(tmp_path: Path, get: Get) -> None:
    make_run(tmp_path / "x")
    for path in ("/", "/data?first"):
        answer = get(path)
        assert (answer.status, answer.headers["Content-Security-Policy"]) == (200, "frame-ancestors 'none'")
    policy = get("/").read().decode().partition('Policy" content="')[2].partition('">')[0]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    for path in ("/../x/config.toml", "/x/config.toml", "/%2e%2e/x/config.toml", "//etc/passwd", "/favicon.ico"):
        assert get(path).status == 404
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"):
        assert get("/data?first", host=host).status == 403
    assert get("/data?first", host="localhost:8000").status == 200, "as through ssh -L 8000:127.0.0.1:6070"
    assert get("/data?first", method="POST").status == 501


def test_the_data_grow_over_the_wire(tmp_path: Path, get: Get) -> None:
    run = make_run(tmp_path / "x & y")
    (first,) = json.loads(get("/data?first").read())
    grow(run, 41, 45)
    asked = urlencode([("run", first["path"]), ("read", first["read"])])
    (later,) = json.loads(get(f"/data?{asked}").read())
    assert later["train"]["step"] == [41, 42, 43, 44, 45]
    make_run(tmp_path / "z")
    assert [one["name"] for one in json.loads(get(f"/data?{asked}").read())] == ["x & y", "z"]
    assert "train" not in json.loads(get("/data?").read())[0], "nothing was asked for"


def test_only_loopback_listens(tmp_path: Path) -> None:
    with serving(tmp_path) as port, socket.socket() as other:
        other.bind(("127.0.0.2", port))  # free: the server does not listen on every address
        with pytest.raises(UserError, match=rf"--port {port}: .*0 takes any free one"):
            Server(list, port)


def test_a_saved_page_holds_all_and_what_others_wrote_ends_no_script(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    run = make_run(tmp_path / "x")
    grow(run, 41, 50, sample="</script><script>alert(1)</script>")
    saved = page([run]).decode()
    assert "<script>alert" not in saved
    assert saved.count("</script>") == 3
    assert 'src="' not in saved.replace('src="data:', "")[-20_000:]
    data = saved.partition('type="application/json">')[2].partition("</script>")[0]
    assert json.loads(data)[0]["samples"][-1]["text"] == "</script><script>alert(1)</script> 50"


def test_without_plotly_the_message_has_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanogpt_cli.view.watch.find_spec", lambda name: None)
    for call in (lambda: page([make_run(tmp_path / "x")]), lambda: Server(list, 0)):
        with pytest.raises(UserError, match="pip install plotly"):
            call()  # type: ignore[no-untyped-call]
