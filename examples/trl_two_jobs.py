"""Two TRL GRPO jobs that share one machine: while one generates, the other trains.

    pip install 'slackwater[peers]'
    slackwater up --set coschedule.placement=group            # prints a URL and a key
    SLACKWATER_URL=... SLACKWATER_KEY=... python examples/trl_two_jobs.py

GRPOTrainer is subclassed, not patched: five lines say which part of a step is which phase. With
SLACKWATER_OFFLINE=1 the jobs run without permits.
"""

import os
import subprocess
import sys
import tempfile
from typing import Any

import slackwater

STEPS = 10


def run_job(name: str, seed: int) -> None:
    """One job, with a tiny random model and a reward for digits."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    torch.manual_seed(seed)

    class SharedGRPO(GRPOTrainer):  # type: ignore[misc]
        """Generation is the rollout phase; from there to the end of the optimizer's step it is the
        train phase.
        """

        train_phase = slackwater.phase("train")
        in_train = False

        @slackwater.phase("rollout")
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return super()._generate_and_score_completions(inputs)

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            if not self.in_train:
                self.train_phase.__enter__()
                self.in_train = True
            return inputs

    class EndOfStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.train_phase.__exit__(None, None, None)
            trainer.in_train = False
            print(f"{name}: step {len(rewards)} of {STEPS}, reward {rewards[-1]:.3f}", flush=True)

    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    text = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    net = Qwen3Config(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    rewards: list[float] = []

    def digits(completions: list[str], **_: Any) -> list[float]:
        shares = [sum(c.isdigit() for c in each) / max(len(each), 1) for each in completions]
        rewards.append(sum(shares) / len(shares))
        return shares

    with tempfile.TemporaryDirectory() as folder:
        trainer = SharedGRPO(
            model=Qwen3ForCausalLM(net).float(),
            processing_class=tokenizer,
            reward_funcs=digits,
            train_dataset=Dataset.from_list([{"prompt": f"{i:016d}"} for i in range(256)]),
            callbacks=[EndOfStep()],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                seed=seed,
                max_steps=STEPS,
                per_device_train_batch_size=64,
                num_generations=8,
                max_completion_length=24,
                learning_rate=1e-3,
                beta=0.0,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
                remove_unused_columns=False,
            ),
        )
        slackwater.join(name, iterations=STEPS, slo=2.5)
        trainer.train()


def main() -> None:
    if len(sys.argv) == 3:
        run_job(sys.argv[1], int(sys.argv[2]))
        return
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    jobs = [
        subprocess.Popen([sys.executable, __file__, f"trl-{seed}", str(seed)], env=environment)
        for seed in range(2)
    ]
    sys.exit(max(job.wait() for job in jobs))


if __name__ == "__main__":
    main()
