"""One rank of two: shards a small model with FSDP2 over gloo, trains it, and publishes its part."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deltawire import codec
from deltawire.attest import digests
from deltawire.errors import InputError
from deltawire.export.source import open_source
from deltawire.store import open_bucket
from deltawire.sync import ShardPublisher, create_run
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import Run

STEPS = 3


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    # 7 rows over 2 ranks: shards of different size, and a bias that only one rank may hold.
    return torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1, bias=True)
    )


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model()
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    source = open_source("f32", model)
    held = {
        name: (codec.bits_of(bits), start) for name, (bits, start) in source.shards(rank).items()
    }
    total = sum((codec.digest_bits(name, *shard) for name, shard in held.items()), codec.ZERO)
    mirror = Mirror(
        {name: bits.copy() for name, (bits, _) in held.items()}, -1, codec.ZERO,
        {name: start for name, (_, start) in held.items() if start},
    )  # fmt: skip
    lanes = torch.tensor([total.lane0 - 2**63, total.lane1 - 2**63], dtype=torch.int64)
    gathered = [torch.empty_like(lanes) for _ in range(ranks)]
    dist.all_gather(gathered, lanes)
    digest = sum((codec.Digest(int(a) + 2**63, int(b) + 2**63) for a, b in gathered), codec.ZERO)
    bucket = open_bucket(folder)
    table = Run(
        id="ab" * 16, name="fsdp2", created_at=0.0, tensors=source.specs(),
        digest=digest.hex(), chunk=16,
    )  # fmt: skip
    run = create_run(bucket, table)
    publisher = ShardPublisher(
        bucket, run, mirror, rank=rank, ranks=ranks, epoch=0, session="only",
        anchor_every=2, timeout_s=60,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS + 1):
        if step:
            optimizer.zero_grad()
            model(torch.ones(2, 6) * step).sum().backward()
            optimizer.step()
        version = publisher.publish(
            {name: shard.bits for name, shard in source.shards(rank).items()}
        )
        publisher.flush()
        whole = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()
        }
        attested = digests(model)
        assert not attested.copies_disagree
        if rank == 0:
            bucket.put(f"attested/{version}", attested.digest.encode())
            torch_free = {name: codec.bits_of(tensor) for name, tensor in whole.items()}
            bucket.put(f"wanted/{version}", codec.digest_model(torch_free).hex().encode())
    publisher.close()
    state = dict(model.state_dict())
    if rank:
        state["bad"] = torch.zeros(2, dtype=torch.complex64)
    try:
        digests(state)
    except InputError as error:
        bucket.put(f"failed/{rank}", str(error).encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main(sys.argv[1])
