"""Compiles the attention kernels for GPUs that need not be there, and prints what each build takes, as JSON.

python -m tests.modeling.attention_builds 90:bf16:128 75:fp16:64
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autotune.modeling import tree_attention_kernels as kernels

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ROWS = (4, 32, 256)  # of a KV head: blocks of 16, 32 and 64


def build(function: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int) -> Any:
    """Compile one kernel, whose pointers and strides are multiples of 16 as torch's are; returns what ``cuobjdump``
    says.
    """
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    aligned = [
        (index,)
        for index, name in enumerate(function.arg_names)
        if name not in constants and (types[name].startswith("*") or name.endswith("stride"))
    ]
    attributes = {at: [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "shared": compiled.metadata.shared,
    }


def main() -> None:
    for argument in sys.argv[1:]:
        capability, dtype, size = argument.split(":")
        types = {name: f"*{dtype}" for name in ("query", "keys", "values", "result", "sinks")}
        types |= {name: "*fp32" for name in ("part_out", "part_lse")} | {"mask": "*i64", "scale": "fp32"}
        types |= {name: "i32" for name in kernels._attend_part.arg_names if name.endswith("stride")}
        types |= {"softcap": "fp32", "num_rows": "i32", "num_kv_heads": "i32"}
        for num_rows in ROWS:
            chosen = kernels.variant(num_rows, int(size), 4096, ITEM_BYTES[dtype])
            common = {"GROUPS": 4, "SIZE": int(size), "DIMS": chosen["DIMS"], "SPLIT": chosen["SPLIT"]}
            constants = common | {"ROWS": chosen["ROWS"], "TILE": chosen["TILE"], "HAS_SOFTCAP": False}
            options = kernels.launch_options(chosen)
            found = build(kernels._attend_part, types, constants, int(capability), **options)
            print(json.dumps({"build": argument, "rows": chosen["ROWS"], **found}), flush=True)
        constants = common | {"PARTS": 16, "HAS_SINKS": True}
        found = build(kernels._merge_parts, types, constants, int(capability), num_warps=4)
        print(json.dumps({"build": argument, "rows": 1, **found}), flush=True)


if __name__ == "__main__":
    main()
