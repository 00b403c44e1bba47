"""Turns a state dict of the authors' PatchTST (a .pth of torch.save) into the safetensors file that import_weights reads.

    python3 scripts/pth_to_safetensors.py checkpoint.pth OUT.safetensors

The prefixes module. and model. are taken off the names. Needs torch; nothing but tensors is unpickled.
"""
import json
import struct
import sys

try:
    import torch
except ImportError:
    sys.exit("pth_to_safetensors: needs torch: pip install torch")

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def plain(name):
    for prefix in ("module.", "model."):
        name = name.removeprefix(prefix)
    return name


def write(path, tensors):
    """A safetensors file of {name: tensor}."""
    header, values, at = {}, [], 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.dtype not in DTYPES:
            sys.exit(f"pth_to_safetensors: {name}: {tensor.dtype} is not one of {', '.join(map(str, DTYPES))}")
        values.append(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(values[-1])]}
        at += len(values[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(values))


def main(source, target):
    state = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        sys.exit(f"pth_to_safetensors: {source}: not a state dict: save model.state_dict()")
    tensors = {plain(name): tensor for name, tensor in state.items()}
    if len(tensors) != len(state):
        sys.exit(f"pth_to_safetensors: {source}: two names are one without their prefixes")
    write(target, tensors)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: pth_to_safetensors.py IN.pth OUT.safetensors")
    main(*sys.argv[1:])
