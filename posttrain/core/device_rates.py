"""Published rates of accelerators: matrix products, memory, and the links between devices. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9


@dataclass(slots=True, frozen=True, kw_only=True)
class DeviceRates:
    """What the vendor's data sheet says of one device; bytes per second are in one direction."""

    memory_gib: float
    flops: float  # of dense bfloat16 products, per second
    memory: float  # bytes per second of its own memory
    link: float  # to the other devices of its machine: NVLink, Infinity Fabric or PCIe
    network: float  # to other machines: one InfiniBand port per device as in the vendor's own systems
    host: float  # to host memory: PCIe


DEVICES = {
    # NVIDIA A100 80GB SXM: DGX A100, NVLink 3 (600 GB/s both ways), HDR InfiniBand (200 Gb/s), PCIe 4.
    "a100": DeviceRates(
        memory_gib=80.0, flops=312 * TERA, memory=2039 * GIGA, link=300 * GIGA, network=25 * GIGA, host=32 * GIGA
    ),
    # NVIDIA H100 SXM: DGX H100, NVLink 4 (900 GB/s both ways), NDR InfiniBand (400 Gb/s), PCIe 5.
    "h100": DeviceRates(
        memory_gib=80.0, flops=989.4 * TERA, memory=3350 * GIGA, link=450 * GIGA, network=50 * GIGA, host=64 * GIGA
    ),
    # NVIDIA H800: as H100 with NVLink of 400 GB/s both ways (DeepSeek-V3 technical report, arXiv:2412.19437).
    "h800": DeviceRates(
        memory_gib=80.0, flops=989.4 * TERA, memory=3350 * GIGA, link=200 * GIGA, network=50 * GIGA, host=64 * GIGA
    ),
    # NVIDIA H20: 96 GB, 148 TFLOP/s.
    "h20": DeviceRates(
        memory_gib=95.0, flops=148 * TERA, memory=4000 * GIGA, link=450 * GIGA, network=50 * GIGA, host=64 * GIGA
    ),
    # NVIDIA H200 SXM: DGX H200.
    "h200": DeviceRates(
        memory_gib=140.0, flops=989.4 * TERA, memory=4800 * GIGA, link=450 * GIGA, network=50 * GIGA, host=64 * GIGA
    ),
    # NVIDIA B200: DGX B200, NVLink 5 (1,800 GB/s both ways).
    "b200": DeviceRates(
        memory_gib=178.0, flops=2250 * TERA, memory=8000 * GIGA, link=900 * GIGA, network=50 * GIGA, host=64 * GIGA
    ),
    # NVIDIA L40S: PCIe 4 only; machines with one port of 200 Gb/s per two devices are usual.
    "l40s": DeviceRates(
        memory_gib=45.0, flops=362 * TERA, memory=864 * GIGA, link=32 * GIGA, network=12.5 * GIGA, host=32 * GIGA
    ),
    # AMD Instinct MI300X: Infinity Fabric, 7 links of 64 GB/s.
    "mi300x": DeviceRates(
        memory_gib=191.0, flops=1307 * TERA, memory=5300 * GIGA, link=448 * GIGA, network=50 * GIGA, host=64 * GIGA
    ),
}


def rates_of(device_name: str) -> DeviceRates | None:
    """Return the rates of a device by torch's name for it, such as `NVIDIA H100 80GB HBM3`; None if unknown."""
    words = device_name.lower().replace("-", " ").split()
    if "pcie" in words or "nvl" in words:  # slower than those of the table
        return None
    return next((DEVICES[word] for word in words if word in DEVICES), None)
