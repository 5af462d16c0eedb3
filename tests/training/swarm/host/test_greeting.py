"""What `dalle-lean host` says once its run is ready."""

import ipaddress

import pytest

from training.commands.host import who_joins


@pytest.mark.parametrize(("address", "who"), [("127.0.0.1", "on this machine, join"), ("203.0.113.5", "any machine")])
def test_a_run_on_a_loopback_address_asks_no_other_machine_to_join(address, who):
    said = who_joins(ipaddress.ip_address(address))
    assert who in said
    assert ("any machine" in said) == (who == "any machine")
