"""The same GRPO step through TRL's GRPOTrainer, in a process of its own: prints one JSON object.

TRL 1.16 with transformers' generation, fp32, one thread, no reference model, no checkpoints, no
reports: what it costs when it is set up for speed on this machine. `python -m
benchmarks.training.grpo_peer '{"steps": 30, ...}'`.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
)

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.training.grpo_step import NET, StepShape

trl: Any = importlib.import_module("trl")  # an extra: absent where only types are checked
transformers: Any = importlib.import_module("transformers")

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")


@dataclass(slots=True)
class Clock(transformers.TrainerCallback):  # type: ignore[misc]  # its base is an extra without types
    """CPU seconds at the end of each step."""

    ends_s: list[float] = field(default_factory=list)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends_s.append(time.process_time())


def tokenizer() -> Any:
    """Bytes after three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL_TOKENS, *alphabet]
    base = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    pad, start, end = SPECIAL_TOKENS
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token=pad, bos_token=start, eos_token=end
    )
    made.padding_side = "left"
    return made


def model() -> Any:
    """The bench's net as transformers has it."""
    fields = NET.to_hf() | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields)).float()


def settings(folder: str, shape: StepShape, steps: int, seed: int) -> Any:
    """One update a step on all of its samples, nothing else."""
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        fp16=False,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=shape.prompts * shape.group,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=shape.group,
        max_completion_length=shape.new_tokens,
        generation_kwargs={"min_new_tokens": shape.new_tokens},
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        use_vllm=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def workload(
    folder: str, shape: StepShape, steps: int, seed: int, rewards: list[float]
) -> dict[str, Any]:
    """What a trainer is made of: a random model that is rewarded for digits. Each step's mean
    reward goes into `rewards`.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)

    def digit_share(completions: list[str], **_: Any) -> list[float]:
        shares = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
        rewards.append(sum(shares) / len(shares))
        return shares

    prompts = [{"prompt": f"{i:0{shape.prompt_tokens}d}"} for i in range(1024)]
    return {
        "model": model(),
        "processing_class": tokenizer(),
        "reward_funcs": digit_share,
        "args": settings(folder, shape, steps, seed),
        "train_dataset": Dataset.from_list(prompts),
    }


def main() -> None:
    options = json.loads(sys.argv[1])
    shape, warm_up = StepShape(**options["shape"]), int(options["warm_up"])
    rewards: list[float] = []
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        steps = warm_up + int(options["steps"])
        made = workload(folder, shape, steps, options["seed"], rewards)
        trainer = trl.GRPOTrainer(**made, callbacks=[clock])
        trainer.train()
    cpu_s = clock.ends_s[-1] - clock.ends_s[warm_up - 1]
    found = {
        "cpu_s_per_step": cpu_s / options["steps"],
        "rewards": rewards,
        "trl": trl.__version__,
        "transformers": transformers.__version__,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
