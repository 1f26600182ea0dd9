"""Compiles every kernel for GPUs that need not be there; prints the outcome of each as JSON."""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deltawire.placement import triton_kernels as kernels

POINTERS = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}


def variants():
    """Each kernel with its types and constants."""
    for width, live in POINTERS.items():
        kind = kernels._POINTED[width]
        for index in ("*i32", "*i64"):
            table = {"table": "*i64", "index": index, "bits": live, "found": "*i32"}
            constants = {"kind": kind, "block": kernels.BLOCK}
            yield kernels._check, {**table, "slot": "i32"}, constants
            yield kernels._write, table, constants
        for dims in (1, 2, 3):
            for widened in {False, width == 4}:
                types = {"live": live} | dict.fromkeys(kernels._VARYING, "i64")
                types |= dict.fromkeys(("count", "size1", "size2"), "i32")
                types |= {"lanes": "*i64", "odd": "*i32"}
                yield (
                    kernels._digest,
                    types,
                    {
                        "step": kernels.signed(kernels.STEP), "dims": dims, "contiguous": dims == 1,
                        "width": 16 if widened else 8 * width, "widened": widened, "slots": 64,
                        "rounds": kernels._DIGEST_ROUNDS, "block": kernels._DIGEST_BLOCK,
                    },
                )  # fmt: skip


def main():
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for kernel, types, constants in variants():
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        source = ASTSource(kernel, signature, {(names.index(n),): c for n, c in constants.items()})
        warps = 4 if kernel is kernels._digest else kernels._WARPS
        made = triton.compile(source, target=target, options={"num_warps": warps})
        spills = ".local .align" in made.asm["ptx"]
        line = {"kernel": kernel.__name__, "bytes": len(made.asm["cubin"]), "spills": spills}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
