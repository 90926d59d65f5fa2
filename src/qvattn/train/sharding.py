"""Weights, gradients and optimizer state divided over the processes of a job (FSDP2, `fully_shard`), and their shards.

Every block is a unit that is gathered when it is needed and let go afterwards; cross-attention is one of its own, since
the memory's streams are made before the blocks run. What is trained is what one process trains: the same sums in
another order.

Shards are safetensors files, one a process, written and read by torch.distributed.checkpoint: any number of processes
reads what any other number wrote. They must never be written in a format that unpickles (the default one does).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import UserError
from ..models.block import Block
from .checkpoint import MODEL_SHARDS, OPTIMIZER_SHARDS, Checkpoint, digest
from .processes import Processes

MEMORY_METHODS = ("memory_streams", "over_memory_with_weights")
"""How a model calls its cross-attention, instead of `forward`."""


def divide(model: nn.Module, processes: Processes, device: torch.device, *, precision: str, reshard: bool) -> None:
    """Divide the parameters of `model` over the processes, in place.

    precision: with "bf16" weights are gathered and used in bf16; what is kept and updated, and the sum of gradients,
        stays fp32. reshard: let a unit's weights go between forward and backward (less memory, more traffic).
    Raises `UserError` for fp16: its loss scale is not shared by shards.
    """
    if precision == "fp16":
        raise UserError("train.precision: fp16 cannot be sharded (train.parallel=fsdp2); use bf16 or fp32")
    mesh = init_device_mesh(device.type, (processes.count,))
    # blocks keep a residual stream in fp32 under autocast, as they do unsharded, so inputs are not cast
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    # blocks return views, which nothing here writes into
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if hasattr(block, "cross_attn"):
            fully_shard(block.cross_attn, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            for name in MEMORY_METHODS:
                setattr(block.cross_attn, name, _announced(block.cross_attn, getattr(block.cross_attn, name)))
                register_fsdp_forward_method(block.cross_attn, name)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot average; the sum is then divided
        assert isinstance(unit, nn.Module)
        unit.register_forward_pre_hook(lambda module, _inputs: _announce(module))


def is_divided(model: nn.Module) -> bool:
    """Whether `divide` was called on the model."""
    return isinstance(model, FSDPModule)


def _announce(module: nn.Module) -> None:
    """Gathering weights hides from PyTorch's version counter; whatever remembers a product of them must be told."""
    if not torch.is_grad_enabled():
        torch.autograd.graph.increment_version([p for p in module.parameters() if not isinstance(p, DTensor)])


def _announced(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _announce(module)
        return method(*args, **kwargs)

    return call


# -- shards ------------------------------------------------------------------------------------------------------


def write_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes
) -> dict[str, str]:
    """Write this process's part of weights and moments below `folder`; all processes call it together.

    Returns the SHA-256 sums of the files that this process wrote, by their path below `folder`.
    """
    for name, tensors in ((MODEL_SHARDS, weights(model)), (OPTIMIZER_SHARDS, moments(model, optimizer))):
        writer = HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=processes.patient_group)
    own = f"shard-{processes.index + 1:05d}-*.safetensors"
    return {
        f"{name}/{file.name}": digest(file)
        for name in (MODEL_SHARDS, OPTIMIZER_SHARDS)
        for file in sorted((folder / name).glob(own))
    }


def read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, whole or divided, from shards of any number of processes.

    Raises `UserError` when a name or size does not match, or a file is damaged.
    """
    try:
        reader = HuggingFaceStorageReader(str(folder))
        present = reader.read_metadata().state_dict_metadata
        _check_names(
            folder,
            {name: tuple(entry.size) for name, entry in present.items() if isinstance(entry, TensorStorageMetadata)},
            tensors,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")
            # every process reads what it needs by itself: nothing has to be agreed on
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except UserError:
        raise
    except Exception as error:  # safetensors and torch raise many kinds for a damaged file
        raise UserError(f"shards in {folder} cannot be read ({' '.join(str(error).split())[:300]})") from error


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return dict(model.state_dict())


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer's state by name: `exp_avg.decoder.last_norm.weight` and so on."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}.{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's optimizer state, sharded or whole, into an optimizer over whole or divided parameters."""
    if checkpoint.sharded:
        _fill_with_zeros(optimizer)
        read_shards(checkpoint.path / OPTIMIZER_SHARDS, moments(model, optimizer))
        return
    state = checkpoint.optimizer()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state["state"].items():
        like = parameters[index]
        if isinstance(like, DTensor):
            state["state"][index] = {key: _like(value, like) for key, value in entries.items()}
    optimizer.load_state_dict(state)


def fill_divided(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy whole weights into a divided model, each process its part; a name that does not match raises KeyError."""
    with torch.no_grad():
        for name, tensor in weights(model).items():
            tensor.copy_(_like(whole[name], tensor) if isinstance(tensor, DTensor) else whole[name])


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The weights of a divided model put together, on the CPU; all processes call it, those with `keep` get them."""
    whole = {}
    for name, tensor in weights(model).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = full.detach().cpu()
    return whole


def _fill_with_zeros(optimizer: torch.optim.Optimizer) -> None:
    """The state that Adam makes in its first step, so that there is something to read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.device if group.get("fused") else "cpu"
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _like(value: Any, parameter: DTensor) -> Any:
    """This process's part of a whole moment, cut as its parameter is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    whole = value.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _check_names(folder: Path, present: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    for kind, names in (("missing", tensors.keys() - present.keys()), ("unexpected", present.keys() - tensors.keys())):
        if names:
            raise UserError(f"shards in {folder}: {kind} tensors: {', '.join(sorted(names)[:5])}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != present[name]:
            raise UserError(
                f"shards in {folder}: {name} has shape {list(present[name])}, {list(tensor.shape)} is needed; "
                "is a file missing?"
            )
