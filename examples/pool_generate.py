"""Generate texts with a model of Hugging Face: each device takes the next prompt when it is free.

python examples/pool_generate.py                 the model is tiny, and has learned nothing
python examples/pool_generate.py --sample --tokens 60
DATAPARALLEL_VIRTUAL_DEVICES=4 python examples/pool_generate.py   # 4 accelerators in host memory

It needs transformers: pip install ".[trainer]"
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dataparallel as dp

SUBJECTS, VERBS = ("A pool", "One device", "The host"), ("gives", "takes", "waits for", "computes")
LAST = 256  # after the bytes: the end of a text


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_embd=64, n_layer=2, n_head=4, n_positions=256,
        bos_token_id=LAST, eos_token_id=LAST, pad_token_id=LAST,
    )  # fmt: skip
    net = GPT2LMHeadModel(config).eval()
    prompts = [f"{subject} {verb} " for subject in SUBJECTS for verb in VERBS]
    devices = options.devices.split(",") if options.devices else dp.accelerators() or ["cpu", "cpu"]

    def request(number: int) -> dict[str, object]:
        """Return the arguments of generate for a prompt; the texts have various lengths."""
        ids = torch.tensor([list(prompts[number].encode())])
        length = options.tokens * (1 + number % 4)
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": length,
                "do_sample": options.sample}  # fmt: skip

    with dp.Pool(net, devices) as pool:
        texts = []
        for ids in pool.method("generate").map(map(request, range(len(prompts)))):
            texts.append(bytes(token for token in ids[0].tolist() if token != LAST))
            print(f"{len(texts)}/{len(prompts)}: {texts[-1].decode(errors='replace')[:60]!r}")
    print(f"generated on: {', '.join(map(str, devices))}")

    if options.sample:
        return  # the bare model draws from the generator of the whole process
    bare = [net.cpu().generate(**request(number)) for number in range(len(prompts))]
    same = sum(
        text == bytes(token for token in ids[0].tolist() if token != LAST)
        for text, ids in zip(texts, bare, strict=True)
    )
    print(f"equal to those of the bare model: {same} of {len(prompts)} texts")


def parse_options() -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--devices", help="one for each item at a time: cpu,cpu or cuda:0,cuda:1")
    parser.add_argument("--tokens", type=int, default=8, help="of the shortest text")
    parser.add_argument("--sample", action="store_true", help="draw tokens at random")
    return parser.parse_args()


if __name__ == "__main__":
    main()
