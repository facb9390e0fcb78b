"""``autotune devices``."""

from __future__ import annotations

import click

from autotune.cli import options


@click.command(short_help="List this machine's devices and those with shipped cost tables.")
@options.as_json
def command(as_json: bool) -> None:
    """List this machine's devices, and the devices that searches can be made for without having them."""
    from autotune.console import Console
    from autotune.cost.roofline import datasheets, load_limits
    from autotune.cost.table import shipped_tables
    from autotune.device import fingerprint, local_devices

    local = {device: fingerprint(device) for device in local_devices()}
    limits = {name: load_limits(name) for name in datasheets()}
    measured = {
        name: [path.name.removesuffix(".cost.json") for path in paths] for name, paths in shipped_tables().items()
    }
    if as_json:
        options.print_json(
            {
                "local": {name: {**found.model_dump(), "key": found.key} for name, found in local.items()},
                "measured": measured,
                "estimated": {name: limit.model_dump() for name, limit in limits.items()},
            }
        )
        return
    console = Console()
    rows = [
        [name, found.model, str(found.num_cores), f"{found.memory_bytes / 2**30:.0f} GiB"]
        for name, found in local.items()
    ]
    console.table("This machine", ["device", "model", "cores", "memory"], rows)
    rows = [
        [
            name,
            limits[name].model if name in limits else "-",
            f"{limits[name].memory_gb_per_second:.0f} GB/s" if name in limits else "-",
            ", ".join(measured.get(name, [])) or "none: estimated from the datasheet",
        ]
        for name in sorted({*limits, *measured})
    ]
    console.table("Other devices (--gpu NAME)", ["name", "model", "bandwidth", "measured pairs"], rows)
