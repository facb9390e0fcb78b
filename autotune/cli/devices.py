"""``autotune devices``, the part of ``autotune doctor`` that measures nothing; not listed in the help."""

from __future__ import annotations

import click

from autotune.cli import options


@click.command(short_help="List this machine's devices and those with shipped cost tables.")
@options.as_json
def command(as_json: bool) -> None:
    """List this machine's devices, and the devices that searches can be made for without having them."""
    from autotune.console import Console
    from autotune.cost.roofline import datasheets, load_limits
    from autotune.device import fingerprint, local_devices
    from autotune.doctor.output import measured_pairs, print_other_devices

    local = {device: fingerprint(device) for device in local_devices()}
    if as_json:
        options.print_json(
            {
                "local": {name: {**device.model_dump(), "key": device.key} for name, device in local.items()},
                "measured": measured_pairs(),
                "estimated": {name: load_limits(name).model_dump() for name in datasheets()},
            }
        )
        return
    console = Console()
    rows = [
        [name, device.model, str(device.num_cores), f"{device.memory_bytes / 2**30:.0f} GiB"]
        for name, device in local.items()
    ]
    console.table("This machine", ["device", "model", "cores", "memory"], rows)
    print_other_devices(console)
