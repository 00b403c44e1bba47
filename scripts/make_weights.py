"""Small models of other implementations with what they forecast, for tests/test_weights.c.

    python3 scripts/make_weights.py tests/fixtures/weights

hf_*: folders of transformers' PatchTSTForPrediction. official_*.safetensors: what scripts/pth_to_safetensors.py makes of state dicts
of a model that is written here by the equations of the authors' PatchTST, with their names. Weights and running statistics are random.
forecasts.safetensors: NAME.x [B, L, C] and NAME.y [B, H, C] of each, y computed in double. Needs torch and transformers.
"""
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import PatchTSTConfig, PatchTSTForPrediction

sys.path.insert(0, os.path.dirname(__file__))
from pth_to_safetensors import write  # noqa: E402

B, C, L, H, D, HEADS, FF, LAYERS, P, S = 3, 2, 26, 5, 8, 2, 12, 2, 8, 4

HF = {
    "hf_batchnorm": dict(),
    "hf_layernorm_post": dict(norm_type="layernorm", pre_norm=False, positional_encoding_type="random", activation_function="relu",
                              scaling=None),
    "hf_gelu_tanh": dict(norm_type="layernorm", positional_encoding_type="random", activation_function="gelu_new", context_length=28),
    "hf_individual": dict(norm_type="batchnorm", pre_norm=False, share_projection=False),
    "hf_positions": dict(norm_type="layernorm", dtype="bfloat16"),  # whose table of sines and cosines was altered
}
OFFICIAL = {
    "official_plain": dict(),
    "official_individual": dict(individual=True, affine=True, subtract_last=True, scale=0.41),
    "official_layernorm": dict(norm="layer", padding=False, residual=False, activation="relu"),
}


def disturb(model, positions):
    """Weights and statistics off their beginnings."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.mul_(0.5 + torch.rand_like(tensor))
            elif tensor.is_floating_point() and not name.endswith("scale") and (positions or not name.endswith("position_enc")):
                tensor.add_(0.1 * torch.randn_like(tensor))


def hf_forecast(model, x):
    """What the model forecasts; with heads of each channel's own, which transformers fails to apply, with its parts."""
    if model.config.share_projection:
        return model(past_values=x).prediction_outputs
    out = model.model(past_values=x)
    rows = [head(out.last_hidden_state[:, c].flatten(1)) for c, head in enumerate(model.head.projections)]
    return torch.stack(rows, 2) * out.scale + out.loc


class Transposed(nn.Sequential):
    """BatchNorm1d over the features, at the place in the names that the authors' has."""

    def __init__(self, d):
        super().__init__(nn.Identity(), nn.BatchNorm1d(d), nn.Identity())

    def forward(self, x):
        return self[1](x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Linear(D, D) for _ in range(3))
        self.sdp_attn = nn.Module()
        self.sdp_attn.scale = nn.Parameter(torch.tensor(scale), requires_grad=False)
        self.to_out = nn.Sequential(nn.Linear(D, D))

    def forward(self, x, before):
        n, length, _ = x.shape
        q, k, v = (w(x).view(n, length, HEADS, D // HEADS).transpose(1, 2) for w in (self.W_Q, self.W_K, self.W_V))
        scores = q @ k.transpose(-1, -2) * self.sdp_attn.scale + before
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, D)), scores


class Layer(nn.Module):
    def __init__(self, o):
        super().__init__()
        norm = Transposed if o["norm"] == "batch" else nn.LayerNorm
        self.self_attn, self.norm_attn, self.norm_ffn = Attention(o["scale"]), norm(D), norm(D)
        self.ff = nn.Sequential(nn.Linear(D, FF), nn.GELU() if o["activation"] == "gelu" else nn.ReLU(), nn.Identity(), nn.Linear(FF, D))
        self.residual = o["residual"]

    def forward(self, x, before):
        out, scores = self.self_attn(x, before)
        x = self.norm_attn(x + out)
        return self.norm_ffn(x + self.ff(x)), scores if self.residual else before


class Official(nn.Module):
    def __init__(self, **options):
        super().__init__()
        o = self.o = dict(norm="batch", padding=True, residual=True, activation="gelu", individual=False, affine=False,
                          subtract_last=False, scale=(D // HEADS) ** -0.5) | options
        patches = (L - P) // S + 1 + o["padding"]
        self.backbone = nn.Module()
        self.backbone.W_P = nn.Linear(P, D)
        self.backbone.W_pos = nn.Parameter(torch.empty(patches, D).uniform_(-0.02, 0.02))
        self.backbone.encoder = nn.Module()
        self.backbone.encoder.layers = nn.ModuleList(Layer(o) for _ in range(LAYERS))
        self.head = nn.Module()
        if o["individual"]:
            self.head.linears = nn.ModuleList(nn.Linear(D * patches, H) for _ in range(C))
        else:
            self.head.linear = nn.Linear(D * patches, H)
        if o["affine"]:
            self.revin_layer = nn.Module()
            self.revin_layer.affine_weight = nn.Parameter(torch.ones(C))
            self.revin_layer.affine_bias = nn.Parameter(torch.zeros(C))

    def forward(self, x):
        """x [B, L, C]."""
        o, mean = self.o, x.mean(1, keepdim=True)
        std = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        base = x[:, -1:] if o["subtract_last"] else mean
        z = (x - base) / std
        if o["affine"]:
            z = z * self.revin_layer.affine_weight + self.revin_layer.affine_bias
        z = z.transpose(1, 2)
        z = F.pad(z, (0, S), mode="replicate") if o["padding"] else z
        z = z.unfold(-1, P, S)
        u = self.backbone.W_P(z) + self.backbone.W_pos
        u, before = u.reshape(-1, *u.shape[2:]), 0.0
        for layer in self.backbone.encoder.layers:
            u, before = layer(u, before)
        u = u.reshape(x.shape[0], C, *u.shape[1:]).transpose(2, 3).flatten(2)  # d N, as theirs
        y = torch.stack([w(u[:, c]) for c, w in enumerate(self.head.linears)], 1) if o["individual"] else self.head.linear(u)
        y = y.transpose(1, 2)
        if o["affine"]:
            y = (y - self.revin_layer.affine_bias) / (self.revin_layer.affine_weight + 1e-10)
        return y * std + base


def main(folder):
    os.makedirs(folder, exist_ok=True)
    forecasts = {}

    def keep(name, model, forecast, length):
        x = torch.randn(B, length, C).cumsum(1) * 0.3
        model.double().eval()
        with torch.no_grad():
            forecasts[f"{name}.x"], forecasts[f"{name}.y"] = x, forecast(model, x.double())
        model.float()

    for seed, (name, options) in enumerate(HF.items()):
        torch.manual_seed(seed)
        config = dict(num_input_channels=C, context_length=L, prediction_length=H, patch_length=P, patch_stride=S, d_model=D,
                      num_attention_heads=HEADS, ffn_dim=FF, num_hidden_layers=LAYERS, pooling_type=None, attention_dropout=0.1,
                      path_dropout=0.2, ff_dropout=0.3) | options
        dtype = config.pop("dtype", "float32")
        model = PatchTSTForPrediction(PatchTSTConfig(**config))
        disturb(model, name != "hf_batchnorm" and name != "hf_individual")
        model.eval().to(getattr(torch, dtype)).save_pretrained(os.path.join(folder, name))
        keep(name, model, hf_forecast, config["context_length"])
    for seed, (name, options) in enumerate(OFFICIAL.items()):
        torch.manual_seed(100 + seed)
        model = Official(**options)
        disturb(model, True)
        model.eval()
        with tempfile.NamedTemporaryFile(suffix=".pth") as pth:
            torch.save({f"module.model.{k}": v for k, v in model.state_dict().items()}, pth.name)
            subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), "pth_to_safetensors.py"), pth.name,
                            os.path.join(folder, f"{name}.safetensors")], check=True)
        keep(name, model, lambda m, x: m(x), L)
    write(os.path.join(folder, "forecasts.safetensors"), forecasts)


if __name__ == "__main__":
    main(sys.argv[1])
