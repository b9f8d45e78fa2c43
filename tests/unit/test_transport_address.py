"""Addresses: what is accepted, and what a refusal teaches."""

import pytest

from dd_lightning.transport.address import Address, is_loopback, parse_address, require_loopback

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:29400", "127.0.0.1", 29400),
        ("tcp://host.example:1", "host.example", 1),
        ("tcp://127.0.0.1:0", "127.0.0.1", 0),
        ("tcp://[::1]:5", "::1", 5),
    ],
)
def test_an_address_round_trips(text, host, port):
    assert parse_address(text) == Address(host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("127.0.0.1:29400", "tcp://"),
        ("http://a:1", "does not begin with tcp://"),
        ("tcp://a", "has no port"),
        ("tcp://:5", "has no host"),
        ("tcp://a:99999", "cannot be read"),
        ("tcp://a:b", "cannot be read"),
        ("tcp://a:1/path", "more than a host and a port"),
        ("", "does not begin with tcp://"),
    ],
)
def test_a_refusal_shows_what_was_given_and_how_to_write_it(text, cause):
    with pytest.raises(ValueError, match=cause) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
    assert "tcp://127.0.0.1:29400" in str(caught.value)


def test_only_loopback_without_insecure():
    assert is_loopback("127.0.1.9") and is_loopback("::1") and is_loopback("localhost")
    for host in ("0.0.0.0", "::", "10.0.0.1", "host.example"):
        with pytest.raises(ValueError, match="insecure: true"):
            require_loopback(host, allowed=False)
        require_loopback(host, allowed=True)
    require_loopback("127.0.0.1", allowed=False)
