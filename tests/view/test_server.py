"""The server refuses whoever does not know the token, other sites, and every method that would change something."""

import http.client
import json
import re
import subprocess
import sys

import pytest

from oxrl.view.page import build_page, export_page
from oxrl.view.runs import Runs
from oxrl.view.server import ViewServer, serving
from tests.view.folders import SCRIPT, answer, append, write_run, write_step
from tests.waiting import HANG, wait_until


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=3)


@pytest.fixture
def server(run):
    with serving(Runs([run])) as serving_now:
        yield serving_now


def ask(server, path="", method="GET", token=None, **headers):
    """(status, headers, body); `Host` can be given, and is that of the server otherwise."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANG)
    connection.request(method, f"/{server.token if token is None else token}/{path}", headers=headers)
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def test_the_page_has_a_policy_that_allows_its_own_script_and_nothing_else(server):
    status, headers, body = ask(server)
    policy = headers["Content-Security-Policy"]
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and headers["Referrer-Policy"] == "no-referrer"
    assert b"@@" not in body and b"https://" not in body


@pytest.mark.parametrize("token", ["", "x", "A" * 32, "%2e%2e", "%C3%A9"])
def test_without_the_token_there_is_nothing(server, token):
    status, headers, body = ask(server, "overview", token=token)
    assert status == 404 and b"there is nothing here" in body
    assert server.token not in str(headers)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example", ""])
def test_another_host_is_refused_even_with_the_token(server, host):
    assert ask(server, "overview", Host=host)[0] == 403


def test_another_origin_is_refused(server):
    own = f"http://127.0.0.1:{server.server_port}"
    assert ask(server, "overview", Origin=own)[0] == 200
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{server.server_port + 1}", f"{own}.evil.example"):
        assert ask(server, "overview", Origin=origin)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "FOO"])
def test_the_page_is_read_only(server, method):
    status, _, body = ask(server, "overview", method=method)
    assert status == 405 and b"read-only" in body


def test_head_has_no_body(server):
    status, headers, body = ask(server, "overview", method="HEAD")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 100


@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "run/0/lines/..%2fconfig", "run/0/lines/config", "run/0/answer/1/..%2F..%2Fx/0", "run/9/steps",
     "run/0/step/99", "%00", "run/0/step/" + "9" * 40],
)  # fmt: skip
def test_paths_that_name_no_file_of_a_run_are_not_found(server, path):
    status, _, body = ask(server, path)
    assert status == 404 and b"Traceback" not in body


def test_a_growing_file_is_sent_once(server, run):
    _, headers, body = ask(server, "run/0/lines/metrics")
    assert body.count(b"\n") == 3
    append(run / "metrics.jsonl", {"step": 4, "reward": 0.5})
    query = f"run/0/lines/metrics?from={headers['X-End']}&file={headers['X-File']}"
    assert json.loads(ask(server, query)[2]) == {"step": 4, "reward": 0.5}


def test_a_query_that_makes_no_sense_reads_from_the_beginning(server):
    for query in ("from=-1", "from=x", "from=999999999", "file=x&from=5", "from=%31%30"):
        assert ask(server, f"run/0/lines/metrics?{query}")[2].count(b"\n") == 3


def test_a_request_that_is_no_http_is_refused_in_one_line(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANG)
    connection.connect()
    connection.sock.sendall(b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n")
    received = connection.sock.makefile("rb").read()
    connection.close()
    assert b"could not be read" in received and len(received) < 2000


def test_a_port_in_use_is_named(server, run):
    with pytest.raises(ValueError, match=f"port {server.server_port} cannot be opened .* choose another --port"):
        ViewServer(Runs([run]), server.server_port)


def test_what_a_model_wrote_does_not_end_the_data_of_an_exported_page(tmp_path):
    run = write_run(tmp_path / "run", steps=1, recorded=0)
    write_step(run, 1, [answer(0, 0, SCRIPT + "</script>", 1.0, "</script>")])
    written = export_page(Runs([run]), tmp_path / "pages" / "page.html")
    html = written.path.read_text()
    assert (written.steps, written.left_out) == (1, 0)
    assert build_page('{"a": "</script><script>"}').html.count("<script>") == 1
    assert len(re.findall("</script", html)) == 2 and "connect-src 'none'" in html


def test_an_export_to_a_folder_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="is a folder: name the file to write, such as .*page.html"):
        export_page(Runs([run]), tmp_path)


def test_an_export_keeps_the_last_steps_that_fit_and_all_metrics(tmp_path):
    runs = Runs([write_run(tmp_path / "run", steps=12)])
    whole = export_page(runs, tmp_path / "whole.html")
    part = export_page(runs, tmp_path / "part.html", most=(whole.bytes - len(build_page().html)) // 3)
    assert whole.steps == 12 and 0 < part.steps < 12 and part.steps + part.left_out == 12
    assert part.bytes < whole.bytes


def test_the_command_prints_the_address_and_ends_quietly_with_ctrl_c(run):
    import signal

    command = [sys.executable, "-m", "oxrl", "view", str(run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        port, token = re.findall(r":(\d+)/([\w-]+)/", address)[0]
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=HANG)
        connection.request("GET", f"/{token}/overview")
        assert json.loads(connection.getresponse().read())["runs"][0]["name"] == "run"
        connection.close()
        process.send_signal(signal.SIGINT)
        assert "Ctrl-C" in process.stdout.readline()
        _, errors = process.communicate(timeout=HANG)
        assert (process.returncode, errors) == (0, "")


def test_a_run_that_does_not_exist_is_reported_without_traceback(tmp_path):
    command = [sys.executable, "-m", "oxrl", "view", str(tmp_path / "nowhere"), "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2 and "no run folder" in done.stderr and "Traceback" not in done.stderr


def test_connections_above_the_limit_are_closed(server):
    import socket

    held = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(64)]
    wait_until(lambda: server._free._value == 0, "all places are taken")
    with socket.create_connection(("127.0.0.1", server.server_port)) as late:
        late.settimeout(HANG)
        assert late.recv(1) == b""
    for each in held:
        each.close()
    wait_until(lambda: server._free._value == 64, "all places are free again")
    assert ask(server, "overview")[0] == 200
