from importlib.util import find_spec
from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.hardware import GIB, Device, device, load_devices

REQUIRED = {
    "a100_sxm",
    "a100_sxm_40gb",
    "a100_pcie",
    "a40",
    "a10",
    "a30",
    "l4",
    "l40s",
    "h100_sxm",
    "h100_pcie",
    "h200_sxm",
    "h20",
    "h800_sxm",
    "b200_sxm",
    "b300_sxm",
    "gb200",
    "gb300",
    "rtx_3090",
    "rtx_a6000",
    "rtx_6000_ada",
    "rtx_4090",
    "rtx_5090",
    "rtx_pro_6000_server",
    "mi300x",
}


def test_the_catalogue_is_complete_and_sourced() -> None:
    devices = load_devices()
    assert set(devices) >= REQUIRED
    for item in devices.values():
        assert item.source, item.name
        assert bool(item.price_source) == bool(item.price_date) == (item.price_per_hour > 0), item.name
        assert 0.9 * item.memory_bytes < item.usable_memory_bytes <= item.memory_bytes, item.name
        assert 0 < item.idle_power_w < item.power_w, item.name


def test_values_are_in_base_units() -> None:
    h100 = device("h100_sxm")
    assert h100.memory_bytes == 80 * GIB
    assert h100.memory_bandwidth == 3.35e12
    assert h100.flops["bfloat16"] == 989e12
    assert h100.link_bandwidth == 450e9
    assert (h100.sm_version, h100.gpus_per_node, h100.link) == (90, 8, "nvlink")


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_values_agree_with_the_kernel_database() -> None:
    yaml = pytest.importorskip("yaml")
    package = find_spec("aiconfigurator_core")
    assert package is not None
    folder = Path(next(iter(package.submodule_search_locations or []))) / "systems"
    compared = 0
    for name, item in load_devices().items():
        file = folder / f"{name}.yaml"
        if not file.is_file():
            continue
        system = yaml.safe_load(file.read_text())
        gpu, node = system["gpu"], system["node"]
        assert item.memory_bytes == gpu["mem_capacity"]
        assert item.memory_bandwidth == gpu["mem_bw"]
        assert (item.power_w, item.sm_version) == (gpu["power"], gpu["sm_version"])
        assert (item.gpus_per_node, item.link_bandwidth) == (node["num_gpus_per_node"], node["intra_node_bw"])
        assert (item.network_bandwidth, item.pcie_bandwidth) == (node["inter_node_bw"], node["pcie_bw"])
        for dtype in ("bfloat16", "int8", "fp8", "fp4"):
            if f"{dtype}_tc_flops" in gpu:
                assert item.flops[dtype] == pytest.approx(gpu[f"{dtype}_tc_flops"], rel=1e-4)
        compared += 1
    assert compared >= 12


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "h100_sxm"),
        ("H100-SXM", "h100_sxm"),
        ("a100", "a100_sxm"),
        ("a100_80gb", "a100_sxm"),
        ("a100-40gb", "a100_sxm_40gb"),
        ("NVIDIA H200", "h200_sxm"),
        ("RTX 4090", "rtx_4090"),
        ("rtx_pro_6000", "rtx_pro_6000_server"),
    ],
)
def test_aliases(name: str, found: str) -> None:
    assert device(name).name == found


def test_no_alias_means_two_devices() -> None:
    names = [alias for item in load_devices().values() for alias in (item.name, *item.aliases)]
    assert len(names) == len(set(names))


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown device 'h1000': did you mean 'h100'"):
        device("h1000")


NEW = """
[tpu_x]
memory_gib = 32
memory_bandwidth = 1000
flops = { bfloat16 = 100 }
power_w = 200
idle_power_w = 50
gpus_per_node = 4
link = "pcie"
link_bandwidth = 32
pcie_bandwidth = 32
network_bandwidth = 12.5
"""


def test_a_file_adds_devices_and_overrides_single_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(NEW + "[h100]\nprice_per_hour = 1.5\nprice_source = 'contract'\nprice_date = '2026-01-01'\n")
    devices = load_devices(file)
    assert devices["tpu_x"].usable_memory_bytes == devices["tpu_x"].memory_bytes == 32 * GIB
    assert devices["tpu_x"].gpus_per_domain == 4
    assert devices["h100_sxm"].price_per_hour == 1.5
    assert devices["h100_sxm"].flops == device("h100").flops
    assert device("tpu_x", [file]) == devices["tpu_x"]
    assert "tpu_x" not in load_devices()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[h100]\nmemory_gb = 80", "unknown key of device h100_sxm 'memory_gb': did you mean 'memory_gib'"),
        ("[h100]\npower_w = 'much'", "power_w='much': must be a number"),
        ("[h100]\nmemory_gib = nan", "memory_gib=nan: must be a number"),
        ("[h100]\nmemory_bandwidth = 0", "memory_bandwidth=0.0: must be > 0"),
        ("[h100]\nlink = 'nvlnk'", "did you mean 'nvlink'"),
        ("[h100]\nflops = { bfloat16 = 1, fp9 = 2 }", "did you mean 'fp8'"),
        ("[h100]\nflops = { fp8 = 2 }", "must have bfloat16"),
        ("[h100]\nidle_power_w = 800", "idle_power_w"),
        ("[h100]\nusable_memory_gib = 81", "usable_memory_bytes"),
        ("[new]\nmemory_gib = 1", "missing key"),
        ("h100 = 3", "must be a table"),
        ("[h100", "not TOML"),
    ],
)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        load_devices(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_devices(tmp_path / "nothing.toml")


def test_devices_are_values() -> None:
    assert isinstance(device("l4"), Device)
    assert hash(device("l4")) == hash(device("l4"))
    assert device("l4").peak_flops("fp8") == 242e12
    assert device("l4").peak_flops("fp4") == 121e12  # no fp4 units: converted first
    assert [device(name).is_blackwell_datacentre for name in ("b200", "gb300", "rtx_pro_6000", "h100")] == [
        True,
        True,
        False,
        False,
    ]
