"""Contrastive pretraining and captioning as an ordinary LightningModule."""

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from dd_lightning.tasks.optimizer import OptimizerConfig, adamw, build_config
from dd_lightning.tasks.text.gpt import GPTConfig
from dd_lightning.tasks.vision import ViTConfig
from dd_lightning.tasks.vision.extra import require

from .contrast import gather, group_size, info_nce, recalls
from .networks import Captioner, Contrast, ContrastConfig, PictureEncoder, TextEncoder

OBJECTIVES = ("contrastive", "caption", "both")
VIT = {"patch": 8, "width": 64, "depth": 3}  # what is not given; smaller than the networks' own
GPT = {"width": 64, "depth": 2}
OURS = ("vocabulary", "max_length")  # of a GPTConfig: the data's


class VisionLanguageModule(pl.LightningModule):
    """Trains on pictures and the ids of their names, as `VisionLanguageDataModule` gives them.

    The contrastive loss is that over the pairs of all ranks of the learner. Logs `train_loss` per
    step, and of the whole validation split, one picture for each name: `val_loss` (nats; of "both"
    the sum), `contrastive_loss`, `recall_at_1` and `recall_at_5` (means of both directions, a tie
    is a miss), `retrieval_candidates`; `caption_loss` (per id) and `caption_bits_per_byte`. A token
    of the ledger is a picture.

    Args:
        objective: "contrastive", "caption" or "both".
        size: pixels of a side.
        vocabulary, text_length: of the data's ids.
        vit, gpt, contrast, optimizer: fields of `ViTConfig`, of `GPTConfig` (for the text encoder
            and the captioner), `ContrastConfig` and `OptimizerConfig`.
    """

    def __init__(
        self,
        objective: str = "contrastive",
        size: int = 32,
        vocabulary: int = 512,
        text_length: int = 32,
        vit: Mapping[str, Any] | None = None,
        gpt: Mapping[str, Any] | None = None,
        contrast: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        vit, gpt = {**VIT, **(vit or {})}, {**GPT, **(gpt or {})}
        contrast, optimizer = dict(contrast or {}), dict(optimizer or {})
        self.save_hyperparameters()  # plain dicts by now: checkpoints load with weights_only=True
        require("torchvision", "task.module")
        if objective not in OBJECTIVES:
            raise ValueError(f"task.module.objective is {objective!r}, allowed are {OBJECTIVES}")
        if given := sorted(set(gpt) & set(OURS)):
            raise ValueError(f"gpt.{given[0]} is the data's: set task.data.vocabulary, text_length")
        vit_config = build_config(ViTConfig, "vit", vit)
        contrast_config = build_config(ContrastConfig, "contrast", contrast)
        self.optimizer_config = build_config(OptimizerConfig, "optimizer", optimizer)
        self.encoder = PictureEncoder(vit_config, size)

        def gpt_config(max_length: int) -> GPTConfig:
            fields = {**gpt, "vocabulary": vocabulary, "max_length": max_length}
            return build_config(GPTConfig, "gpt", fields)

        text = gpt_config(text_length)  # looked at with each objective
        if objective != "caption":
            self.text = TextEncoder(text)
            self.contrast = Contrast(contrast_config, vit_config.width, text.width)
        if objective != "contrastive":
            longest = self.encoder.num_tokens + text_length
            self.captioner = Captioner(gpt_config(longest), vit_config.width)
        self._validated: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        """Under Lightning's ModelParallelStrategy: FSDP2, each network as one unit."""
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for unit in self.children():
            if not isinstance(unit, FSDPModule):  # a later fit calls this again
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    @staticmethod
    def count_tokens(batch: Mapping[str, Tensor]) -> int:
        """Number of pictures in a batch."""
        return batch["name"].numel()

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each pair: `picture` and `text` features of length 1 `[B, E]` with their `scale`; the
        caption's `nats` `[B]`."""
        tokens_BPD = self.encoder(batch["pixels"])
        found = {}
        if self.hparams["objective"] != "caption":
            text_BD = self.text(batch["ids"], batch["end"])
            features = self.contrast(tokens_BPD[:, 0], text_BD)
            found = dict(zip(("picture", "text", "scale"), features, strict=True))
        if self.hparams["objective"] != "contrastive":
            logits_BSV = self.captioner(tokens_BPD, batch["ids"])
            nats_BS = F.cross_entropy(logits_BSV.mT, batch["ids"], reduction="none")
            places = torch.arange(nats_BS.shape[1], device=nats_BS.device)
            found["nats"] = (nats_BS * (places <= batch["end"][:, None])).sum(1)
        return found

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """What is trained, in nats: this rank's share of the whole learner's loss."""
        if self.hparams["objective"] != "caption":
            self.contrast.keep_in_bounds()
        found = self(batch)
        loss = batch["pixels"].new_zeros(())
        if "picture" in found:
            loss = info_nce(found["picture"], found["text"], found["scale"], batch["name"])
        if "nats" in found:
            # a share of the group's mean over ids: names have other lengths on other ranks
            num_ids = gather((batch["end"] + 1).sum()[None]).sum()
            loss = loss + found["nats"].sum() * group_size() / num_ids
        return loss

    def training_step(self, batch: Mapping[str, Tensor], batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), batch_size=len(batch["name"]))
        return loss

    def on_validation_epoch_start(self) -> None:
        self._validated.clear()

    def validation_step(self, batch: Mapping[str, Tensor], batch_index: int) -> None:
        found = self(batch)
        kept = {name: found[name] for name in ("picture", "text", "nats") if name in found}
        self._validated.append({**kept, **{k: batch[k] for k in ("name", "end", "num_bytes")}})
        self._scale = found.get("scale")

    def on_validation_epoch_end(self) -> None:
        columns = {
            name: gather(torch.cat([one[name] for one in self._validated]))
            for name in self._validated[0]
        }
        self._validated.clear()
        # A sampler that fills up the last rank's share repeats pairs: they fall away here too.
        first = {name: place for place, name in reversed([*enumerate(columns["name"].tolist())])}
        chosen = torch.tensor(sorted(first.values()), device=self.device)
        metrics = self._metrics({name: column[chosen] for name, column in columns.items()})
        self.log_dict(metrics, sync_dist=True)  # the same on all ranks

    def _metrics(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        metrics = {}
        if "picture" in columns:
            scores_NN = columns["picture"] @ columns["text"].T
            own = torch.arange(len(scores_NN), device=scores_NN.device)
            logits = self._scale * scores_NN
            loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
            recall = recalls(scores_NN, (1, 5))
            metrics["contrastive_loss"] = loss.item()
            metrics |= {f"recall_at_{k}": recall[k] for k in recall}
            metrics["retrieval_candidates"] = float(len(own))
        if "nats" in columns:
            nats = columns["nats"].sum().item()
            num_bytes = columns["num_bytes"].sum().item()
            metrics["caption_loss"] = nats / (columns["end"] + 1).sum().item()
            metrics["caption_bits_per_byte"] = nats / math.log(2) / max(1, num_bytes)
        parts = [metrics[name] for name in ("contrastive_loss", "caption_loss") if name in metrics]
        return {"val_loss": sum(parts), **metrics}

    def configure_optimizers(self) -> dict[str, Any]:
        return adamw(self, self.optimizer_config)
