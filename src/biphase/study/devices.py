"""A device's name, or a run that had it → what it computes in an hour: its peak, and the share of it that is used; and
its memory."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from biphase.errors import InputError, nearest
from biphase.files import read_json
from biphase.flops import PEAK_FLOPS, known_device
from biphase.machine import total_memory
from biphase.run import open_run, read_metrics
from biphase.study.spec import Study

EFFICIENCY = {"CPU": 0.6}
"""The share of the peak that our own runs reach (docs/LOG.md)."""
ASSUMED_EFFICIENCY = 0.4
"""The same for other devices: a round figure for well-run bf16 training, not a measurement."""


DEVICE_GIB = {
    "GB200": 186,
    "B200": 180,
    "GH200": 96,
    "H200": 141,
    "H200 NVL": 141,
    "H100": 80,
    "H100 NVL": 94,
    "H100 PCIe": 80,
    "A100": 40,
    "MI300X": 192,
    "MI250X": 64,
    "MI250": 64,
    "L40S": 48,
    "L40": 48,
    "L4": 24,
    "A10": 24,
    "A10G": 24,
    "V100": 16,
    "V100 PCIe": 16,
    "T4": 16,
    "RTX 4090": 24,
    "RTX 3090": 24,
}
"""The memory of one device, by the same data sheets; of those that are sold with two sizes, the smaller."""


@dataclass(frozen=True)
class Machine:
    """What trains: so many devices of one kind. A device is a GPU, or a core of a CPU."""

    name: str
    devices: int
    peak_flops: float
    efficiency: float
    source: str
    """Where the efficiency is from, for people."""

    @property
    def speed(self) -> str:
        """What one device computes, for people."""
        if self.efficiency == 1:
            return f"{self.peak_flops / 1e9:,.3g} GFLOP/s, {self.source}"
        return f"{self.peak_flops / 1e12:,.3g} TFLOP/s, {self.efficiency:.0%} of them used, {self.source}"

    @property
    def memory(self) -> float:
        """Bytes of one device, of a CPU those of this machine; 0 where that is not known."""
        return float(total_memory() if self.name == "CPU" else DEVICE_GIB.get(known_device(self.name) or "", 0) * 2**30)

    def device_hours(self, flops: float) -> float:
        """The hours that one device needs for so many FLOPs."""
        return flops / (self.peak_flops * self.efficiency) / 3600

    def flops_in(self, hours: float) -> float:
        """What all its devices together do in some hours."""
        return hours * 3600 * self.devices * self.peak_flops * self.efficiency


def find_machine(name: str, devices: int = 1, efficiency: float | None = None) -> Machine:
    """A device of the table, by a name that it is part of, or what the folder of a run measures (`measure_machine`).

    Raises `InputError` for unknown ones, none of them, an efficiency that is no share, and one beside a run.
    """
    if devices < 1:
        raise InputError(f"{devices} devices compute nothing; give a number from 1 on")
    if efficiency is not None and not 0 < efficiency <= 1:
        raise InputError(f"an efficiency of {efficiency:g} is no share of the peak; give a number above 0 and up to 1")
    if (Path(name) / "config.yaml").exists():
        if efficiency is not None:
            raise InputError(f"{name} is a run, which measures what is reached; leave the efficiency out")
        return measure_machine(Path(name), devices)
    key = known_device(name)
    if key is None:
        raise InputError(f"unknown device or run '{name}'{nearest(name, PEAK_FLOPS)}")
    if efficiency is None:
        return Machine(key, devices, PEAK_FLOPS[key], EFFICIENCY.get(key, ASSUMED_EFFICIENCY), "assumed")
    return Machine(key, devices, PEAK_FLOPS[key], efficiency, "stated")


def measure_machine(path: Path, devices: int) -> Machine:
    """The devices that a run had, as fast as it was: the median of its steps, without the first few.

    Raises `InputError` when the run has logged no more than its first steps.
    """
    run = open_run(path)
    records = read_metrics(run, "train")
    speeds = [record["flops_per_second"] for record in records[len(records) // 10 + 1 :]]
    if not speeds:
        raise InputError(f"{path} has logged too few steps to measure a device by; let it train for longer")
    environment = read_json(run.path / "environment.json")
    is_cpu = environment["device"] == "cpu"
    used = environment["processes"] * (environment["threads"] if is_cpu else 1)
    name = "CPU" if is_cpu else environment["device"]
    return Machine(name, devices, median(speeds) / used, 1.0, f"as measured in {path}")


def study_machine(study: Study, device: str | None = None, efficiency: float | None = None) -> Machine | None:
    """The device that is asked for, else that of the study file; None where neither names one.

    What the file says of the efficiency is said of its own device. Raises `InputError` for an efficiency of none.
    """
    planning = study.planning
    if device is None:
        device = planning.device
        efficiency = planning.efficiency if efficiency is None else efficiency
    if device is None:
        if efficiency is not None:
            raise InputError("an efficiency is that of a device, and none is named; give one, such as H100")
        return None
    return find_machine(device, planning.devices, efficiency)
