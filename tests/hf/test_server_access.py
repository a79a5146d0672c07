"""Who may ask the server: the header Host, the key, and the addresses that `serve` listens on."""

import pytest
from support.cli_models import folder, one_line_error, succeed  # noqa: F401
from support.text_server import NAME, SECONDS, BatchQueue, Server, httpx, make_app, serving

pytestmark = pytest.mark.server

PATHS = ("/health", "/v1/models", "/nowhere", "/docs")
LOCAL = ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "[0:0:0:0:0:0:0:1]"]
FOREIGN = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
    "[::1]evil.example", "127.0.0.1@evil.example", "192.0.2.1", "[2001:db8::1]", "0.0.0.0", "",
    "localhost:80:80", "a" * 5000,
]  # fmt: skip


def statuses(client, hosts, path="/health"):
    return {host: client.get(path, headers={"Host": host}).status_code for host in hosts}


def test_requests_for_other_hosts_are_refused():
    """The name of another site that leads here, as a page within a browser may ask for."""
    with serving() as (client, queue):
        assert statuses(client, LOCAL) == dict.fromkeys(LOCAL, 200)
        for path in PATHS:
            assert statuses(client, FOREIGN, path) == dict.fromkeys(FOREIGN, 400)
        headers = {"Host": "evil.example"}
        answer = client.post("/generate", content=b"{", headers=headers)
        line = "the header Host must name the server, and --allowed-host adds names"
        assert answer.json()["error"]["message"] == f"{line}, got 'evil.example'"
        assert not queue.submitted
        answer = client.options("/v1/models", headers={"Origin": "http://evil.example"})
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("allowed", "taken", "refused"),
    [
        (["Mine.example", "192.0.2.1"], ["mine.example:8000", "192.0.2.1"], ["a.mine.example"]),
        (["0.0.0.0"], ["192.0.2.1:8000", "[2001:db8::1]", "0.0.0.0"], ["mine.example"]),
        (["0.0.0.0"], [], ["localhost"]),
        (["::"], ["192.0.2.1", "[fe80::1]:80"], ["mine.example"]),
        (["[::2]:80", "a.example:1"], ["a.example", "a.example.:80", "[::2]"], ["", "[]"]),
        (["*"], ["mine.example", "192.0.2.1", "a b"], []),
    ],
)  # fmt: skip
def test_hosts_may_be_added(allowed, taken, refused):
    with serving(access={"allowed_hosts": allowed}) as (client, _):
        assert statuses(client, taken) == dict.fromkeys(taken, 200)
        assert statuses(client, refused) == dict.fromkeys(refused, 400)


KEY = "clé à"  # whose last byte is a blank in other encodings


def test_a_key_is_wanted_where_there_is_one():
    """An empty one, which every request without a key would bring, is refused."""
    with pytest.raises(ValueError, match="api_key must have at least one character, got ''"):
        make_app(BatchQueue(None, None), None, api_key="")
    with serving(access={"api_key": KEY}) as (client, queue):
        assert client.get("/health").status_code == client.head("/health").status_code == 200
        wrong = [None, "", KEY, "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer é"]
        for given in wrong:
            headers = {} if given is None else {"Authorization": given.encode()}
            for path in ("/v1/models", f"/v1/models/{NAME}", "/health/", "/docs", "/nowhere"):
                answer = client.get(path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert KEY not in answer.text
            for path in ("/", "/generate", "/generate_stream", "/v1/completions"):
                assert client.post(path, content=b"{", headers=headers).status_code == 401
        for given in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY}"):
            headers = {"Authorization": given.encode()}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert not queue.submitted


def test_the_command_tells_the_server_whom_to_take(folder, monkeypatch):  # noqa: F811
    """By name, by the addresses it listens on, and with the key of an option or a variable."""
    answers, started = [], Server.startup

    async def startup(self, sockets=None):
        await started(self, sockets)
        address = "http://{}:{}".format(*sockets[0].getsockname()[:2])
        async with httpx.AsyncClient(base_url=address, timeout=SECONDS) as client:
            for host in ("mine.example", "localhost", "127.0.0.1", "127.0.0.2", "evil.example"):
                for key in ("secret", "other"):
                    headers = {"Host": host, "Authorization": f"Bearer {key}"}
                    answers.append((await client.get("/v1/models", headers=headers)).status_code)
        self.should_exit = True

    monkeypatch.setattr(Server, "startup", startup)
    start = ("serve", "--model", folder, "--drafter", "none", "--port", 0, "--host", "127.0.0.2")
    start += ("--allowed-host", "mine.example")
    found = [200, 401] * 4 + [400] * 2
    succeed(*start, "--api-key", "secret")
    assert answers == found
    monkeypatch.setenv("SPECDEC_API_KEY", "secret")
    answers.clear()
    assert "secret" not in succeed(*start).output
    assert answers == found
    for wrong in ("", "two words", "schlüssel"):
        line = one_line_error("serve", "--model", folder, "--api-key", wrong)
        rule = "must be of printable ASCII characters without blanks, at least one"
        assert line == f"error: --api-key {rule}"
