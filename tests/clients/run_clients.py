"""Runs other people's tools against a server, as their users would: ``run_clients.py URL MODEL FOLDER``.

FOLDER has the tokenizer of the served model. Each tool that is installed runs; the others are named with what would
install them. None is a dependency of this repository; make an environment for each:

    python -m venv /tmp/lm && /tmp/lm/bin/pip install "lm-eval[api]" transformers
    python -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm
    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm
    infer serve smollm2-135m &
    PATH=/tmp/lm/bin:/tmp/guidellm/bin:/tmp/vllm/bin:$PATH python tests/clients/run_clients.py \\
        http://127.0.0.1:8000 smollm2-135m ~/.cache/infer/models/smollm2-135m

The exit code is 1 if one of them fails. lm-evaluation-harness should give the demo model an accuracy of 1.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
CAPITALS = ("Paris", "London", "Berlin")
COUNTRIES = ("France", "England", "Germany")


def lm_eval(url: str, model: str, tokenizer: str, folder: Path) -> list[str]:
    """A task of log-likelihoods that needs no network: it sends `echo`, `logprobs` and `max_tokens: 1`."""
    rows = [{"country": name, "choices": CAPITALS, "answer": index} for index, name in enumerate(COUNTRIES)]
    (folder / "capitals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "capitals.yaml").write_text(TASK.format(data=folder / "capitals.jsonl"))
    server = f"model={model},base_url={url}/v1/completions,num_concurrent=2"
    arguments = f"{server},tokenizer_backend=huggingface,tokenizer={tokenizer}"
    command = ["lm_eval", "--model", "local-completions", "--model_args", arguments]
    return [*command, "--include_path", str(folder), "--tasks", "capitals"]


def guidellm(url: str, model: str, tokenizer: str, folder: Path) -> list[str]:
    """The profile `sweep`: one after another, all at once, and at a constant rate; its streams ask for usage."""
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={url}", "--profile", "kind=sweep,sweep_size=3"]
    data = "kind=synthetic_text,prompt_tokens=20,output_tokens=8"
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}", "--data", data]
    return [*command, "--constraint", "kind=max_requests,count=4", "--disable-progress"]


def vllm(url: str, model: str, tokenizer: str, folder: Path) -> list[str]:
    """Random prompts of token ids, streamed."""
    command = ["vllm", "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    command += ["--model", model, "--tokenizer", tokenizer, "--dataset-name", "random", "--num-prompts", "8"]
    return [*command, "--random-input-len", "32", "--random-output-len", "16", "--ignore-eos"]


def main(url: str, model: str, tokenizer: str) -> int:
    failed = []
    for tool, needs in ((lm_eval, "lm-eval[api] and transformers"), (guidellm, "guidellm"), (vllm, "vllm")):
        if shutil.which(tool.__name__) is None:
            print(f"{tool.__name__} is not installed; pip install {needs}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = tool(url, model, str(Path(tokenizer).expanduser()), Path(folder))
            print("$", *command, flush=True)
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            ran = subprocess.run(command, cwd=folder, env=environment, check=False)
            if ran.returncode != 0:
                failed.append(tool.__name__)
    print(f"failed: {', '.join(failed)}" if failed else "all that are installed ran through")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
