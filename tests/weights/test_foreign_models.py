"""Llama and Qwen3 models with tokenizers of their own, in a folder or on a stand-in of the hub: sample, eval, train."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_cli.cli import main
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.weights.load import load_model
from tests.foreign_tokenizers import STYLES, TEXT, write_tokenizer

pytest.importorskip("safetensors", reason="the extra hf is not installed")
transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")

PROMPT = "In the year 1984 it's"
NAME, COMMIT = "someone/tiny-llama", "c" * 40

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command line in an empty folder; exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main.run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def write_model(folder: Path, style: str = "digits", rows: int = 420, **changes: Any) -> Path:
    """A random model of a family, its table larger than its tokenizer."""
    write_tokenizer(folder, style)
    family = "Qwen3" if style == "qwen" else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=style == "qwen",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(4)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder, **changes)
    return folder


@pytest.mark.parametrize("style", STYLES)
def test_sample_eval_and_train_with_the_tokenizer_of_the_folder(run: Run, style: str) -> None:
    write_model(Path("theirs"), style)
    ids = transformers.AutoTokenizer.from_pretrained("theirs")(PROMPT, return_tensors="pt")["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained("theirs").eval()
    model.generation_config.pad_token_id = 0
    tokenizer = load_model("theirs").tokenizer
    assert tokenizer is not None
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, suppress_tokens=list(range(tokenizer.size, 420)))
    words = ["--prompt", PROMPT, "--max-new-tokens", "20", "--temperature", "0", "--dtype", "float32"]
    code, out, err = run("sample", "theirs", *words, "--device", "cpu")
    assert code == 0, err
    assert out == tokenizer.decode(expected[0].tolist()) + "\n"

    Path("my.txt").write_text(TEXT, encoding="utf-8")
    assert run("prepare", "my.txt", "--tokenizer", "theirs")[0] == 0
    code, out, err = run("eval", "theirs", "--data", "my", "--json", "--device", "cpu")
    assert code == 0, err
    assert json.loads(out)["bits_per_byte"] > 1
    settings = ["--max-iters", "2", "--batch-size", "2", "--device", "cpu", "--no-sample"]
    code, _, err = run("train", "--init-from", "theirs", "--dataset", "my", "--run", "runs/mine", *settings)
    assert code == 0, err
    for path in Path("theirs").iterdir():
        path.unlink()
    assert run("sample", "mine", "--max-new-tokens", "3")[0] == 0  # the run has all it needs
    code, _, err = run("export", "mine", "out")
    assert code == 0, err
    again = transformers.AutoTokenizer.from_pretrained("out")
    assert again(PROMPT)["input_ids"] == tokenizer.encode(PROMPT).tolist()
    assert again.eos_token_id == tokenizer.eot
    code, _, err = run("export", "mine", "out.gguf")
    assert (code, "this model has the tokenizer hf" in err) == (2, True)


def test_data_of_another_tokenizer_is_refused_with_the_line_to_type(run: Run) -> None:
    write_model(Path("theirs"))
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    assert run("prepare", "my.txt")[0] == 0
    code, _, err = run("eval", "theirs", "--data", "my")
    assert code == 2
    assert "--tokenizer theirs --name my-hf" in err.replace("\n", " ")


def test_a_tokenizer_that_cannot_be_used_is_named_and_ids_are_left(run: Run) -> None:
    path = write_model(Path("theirs")) / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "decoder": {"type": "Sequence", "decoders": []}}), encoding="utf-8")
    code, out, err = run("sample", "theirs", "--prompt", "5 6", "--max-new-tokens", "2", "--device", "cpu")
    assert code == 0
    assert "with the decoder Sequence, no byte-level BPE" in err
    assert out.startswith("5 6")


def test_a_tokenizer_larger_than_the_table_is_not_used(run: Run) -> None:
    write_model(Path("theirs"), rows=270)
    loaded = load_model("theirs")
    assert loaded.tokenizer is None
    assert "is unused: it has 283 ids, the token table 270" in loaded.notes[0]


# --- a stand-in for the hub


class Hub(http.server.ThreadingHTTPServer):
    """One repository, the files of `folder`, as the hub's own protocol gives them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.asked = folder, list[str]()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], sorted(self.server.folder.iterdir())
        if path == f"/api/models/{NAME}/revision/main":
            siblings = [{"rfilename": file.name} for file in files]
            return self.answer(json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files
            ]
            return self.answer(json.dumps(entries).encode())
        start = f"/{NAME}/resolve/{COMMIT}/"
        name = path.removeprefix(start)
        if not path.startswith(start) or not (self.server.folder / name).is_file():
            return self.send_error(404)
        if self.command == "GET":
            self.server.asked.append(name)
        return self.answer((self.server.folder / name).read_bytes())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{len(body):040x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra hf is not installed")
    (tmp_path / "hub").mkdir()
    (tmp_path / "here").mkdir()
    server = Hub(tmp_path / "hub")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.chdir(tmp_path / "here")
    yield server
    server.shutdown()
    server.server_close()


def test_a_name_on_the_hub_is_fetched_once(hub: Hub) -> None:
    write_model(hub.folder)
    (hub.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (hub.folder / "modeling_tiny.py").write_text("raise SystemExit")
    loaded = load_model(NAME)
    assert loaded.source == f"{NAME} at cccccccc (safetensors)"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.kind == "hf"
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(hub.asked) == wanted
    hub.asked.clear()
    hub.shutdown()
    assert torch.equal(load_model(NAME).model.wte.weight, loaded.model.wte.weight)
    assert hub.asked == []


def test_shards_are_fetched_through_their_index(hub: Hub) -> None:
    write_model(hub.folder, "qwen", max_shard_size="40KB")
    names = {path.name for path in hub.folder.glob("model-*.safetensors")}
    assert len(names) > 1
    assert load_model(NAME).model.config.qk_gain
    assert names < set(hub.asked)


def test_what_does_not_fit_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    (hub.folder / "config.json").write_text('{"model_type": "gpt_neo"}')
    (hub.folder / "model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(UserError, match="model_type is 'gpt_neo'; gpt2, llama, qwen3 can be read"):
        load_model(NAME)
    assert hub.asked == ["config.json"]


def test_a_pickle_on_the_hub_is_not_even_fetched(hub: Hub) -> None:
    write_model(hub.folder)
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_model(NAME)
    assert "pytorch_model.bin" not in hub.asked


def test_names_that_are_not_on_the_hub(hub: Hub) -> None:
    with pytest.raises(NanogptError, match="someone/else is no path here, not in the local cache") as error:
        load_model("someone/else")
    assert "404" in str(error.value)
    Path("someone").mkdir()
    with pytest.raises(UserError, match="someone/else: no such model"):
        load_model("someone/else")
    for word in ("runs/x", "out/ckpt.pt", "a/b/c", "../b"):
        with pytest.raises(UserError, match="no such model"):
            load_model(word)
