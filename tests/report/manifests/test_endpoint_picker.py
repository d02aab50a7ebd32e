"""The endpoint picker: a rule of a router in plug-ins, each of which is declared."""

import pytest

from report.manifests.fleets import apart, mixed
from windtunnel.report.manifests.endpoint_picker import picker


@pytest.mark.parametrize("router", ["round_robin", "least_outstanding", "prefix_aware:queue=2"])
def test_every_plug_in_that_a_profile_names_is_declared(router: str) -> None:
    for deployment in (mixed(2, router), apart(router=router)):
        found = picker(deployment.spec())
        declared = {each["type"] for each in found["plugins"]}
        named = {each["pluginRef"] for profile in found["schedulingProfiles"] for each in profile["plugins"]}
        assert named <= declared
    scorers = {each["pluginRef"]: each.get("weight") for each in found["schedulingProfiles"][0]["plugins"]}
    assert ("prefix-cache-scorer" in scorers) == router.startswith("prefix_aware")
    assert ("random-picker" in scorers) == (router == "round_robin")


def test_both_sides_are_filtered() -> None:
    profiles = picker(apart().spec())["schedulingProfiles"]
    assert [(each["name"], each["plugins"][0]["pluginRef"]) for each in profiles] == [
        ("prefill", "prefill-filter"),
        ("decode", "decode-filter"),
    ]
