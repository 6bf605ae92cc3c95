"""Compare preprocessing with `datasets.map`; measure reading of packed batches, and memory.

The text is generated: words by Zipf's law, with punctuation, numbers and line breaks. BENCH_MEGABYTES sets its size
(96), BENCH_TOKENIZER a tokenizer directory (default: a byte-level BPE is trained on a part of the text). With
BENCH_STREAM_MEGABYTES=2000 a file of that size is preprocessed, and its peak memory is printed.
"""

import json
import multiprocessing
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.config.sections import DataConfig
from posttrain.data.dataset import Encoder, load_dataset
from posttrain.data.packing import collate, pack_into_micro_batches
from posttrain.data.preprocessing.handlers import PreprocessConfig
from posttrain.data.preprocessing.preprocess import preprocess

ROWS_PER_STEP = 256
TOKENS_PER_PACK = 16_384
SYLLABLES = [a + b + c for a in ("", *"bdfgklmnprstvw") for b in "aeiou" for c in ("", *"lmnrst")]


def measure_data() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the same number of cores for both
    megabytes = float(os.environ.get("BENCH_MEGABYTES", "96"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "text.jsonl"
        write_text(source, megabytes)
        tokenizer = load_tokenizer(source)
        for workers in (1, 2):
            compare(folder, source, tokenizer, workers)
        read_batches(folder, tokenizer)
        if streamed := float(os.environ.get("BENCH_STREAM_MEGABYTES", "0")):
            write_text(source, streamed)
            stream(folder, source, tokenizer, streamed)


# The text


def write_text(file: Path, megabytes: float) -> None:
    rng = np.random.default_rng(0)
    words = np.array(["".join(rng.choice(SYLLABLES, size)) for size in rng.integers(1, 5, 60_000)])
    weights = 1 / np.arange(10, len(words) + 10)
    weights /= weights.sum()
    with file.open("w", encoding="utf-8") as out:
        while out.tell() < megabytes * 1e6:
            drawn = rng.choice(words, 20_000, p=weights)
            for part in np.split(drawn, np.sort(rng.integers(0, len(drawn), 100))):
                if len(part):
                    out.write(json.dumps({"text": prose(part.tolist(), rng)}) + "\n")


def prose(words: list[str], rng: np.random.Generator) -> str:
    for at, kind in zip(*rng.integers(0, (len(words), 5), (len(words) // 7, 2)).T, strict=True):
        words[at] = (str(at * 37), *(words[at] + end for end in (".", ",", "?", ".\n")))[kind]
    return " ".join(words).capitalize().replace("\n ", "\n")


def load_tokenizer(source: Path):
    if folder := os.environ.get("BENCH_TOKENIZER"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    with source.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(3000), lines, strict=False)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


# Tokenising


def compare(folder: Path, source: Path, tokenizer, workers: int) -> None:
    ours, theirs = [], []
    peer = by_datasets if find_spec("datasets") else by_hand
    for turn in range(2):
        started = time.perf_counter()
        manifest = preprocess(configuration(folder / f"{workers}-{turn}", source, workers), tokenizer, lambda _: None)
        ours.append(manifest["counts"]["tokens"] / (time.perf_counter() - started))
        theirs.append(peer(folder / f"cache-{workers}-{turn}", source, tokenizer, workers))
    named = f"data preprocess, {manifest['counts']['tokens']:,} tokens, {workers} worker{'s' * (workers > 1)}"
    print(f"{named}: {max(ours):,.0f} tokens/s, from the text file to the indexed one")
    whole, mapping = (max(speeds) for speeds in zip(*theirs, strict=True))
    print(f"{named}, {peer.__doc__}: {whole:,.0f} tokens/s, without the time to read the file {mapping:,.0f}")
    print(f"data ratio with {workers}: {max(ours) / whole:.2f}x, without its reading {max(ours) / mapping:.2f}x")


def configuration(folder: Path, source: Path, workers: int) -> PreprocessConfig:
    return PreprocessConfig(
        input=(str(source),),
        output_prefix=str(folder / "out"),
        handler_name="GeneralPretrainHandler",
        workers=workers,
        append_eod=True,
    )


def by_datasets(cache: Path, source: Path, tokenizer, workers: int) -> tuple[float, float]:
    """datasets.map, batched"""
    import datasets

    datasets.disable_progress_bars()
    opened = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(source), cache_dir=str(cache), split="train")
    started = time.perf_counter()
    mapped = rows.map(
        lambda batch: tokenizer(batch["text"]),
        batched=True,
        remove_columns=rows.column_names,
        num_proc=workers if workers > 1 else None,
    )
    ended = time.perf_counter()
    tokens = sum(len(batch) for table in mapped.data["input_ids"].chunks for batch in [table.values])
    return tokens / (ended - opened), tokens / (ended - started)


def by_hand(_: Path, source: Path, tokenizer, workers: int) -> tuple[float, float]:
    """a loop over rows with one process (datasets is not installed)"""
    started = time.perf_counter()
    tokens = 0
    with source.open(encoding="utf-8") as lines:
        for line in lines:
            tokens += len(np.array(tokenizer(json.loads(line)["text"])["input_ids"], dtype=np.int32))
    speed = tokens / (time.perf_counter() - started)
    return speed, speed


# Reading


def read_batches(folder: Path, tokenizer) -> None:
    """Read examples in random order, packed and concatenated as for the learner."""
    config = DataConfig(max_length=2048)
    encoder = Encoder(tokenizer, config, "text", vocab_size=len(tokenizer))
    started = time.perf_counter()
    rows = load_dataset([str(folder / "1-0" / "out")], encoder).examples
    opened = time.perf_counter() - started
    order = np.random.default_rng(0).permutation(len(rows))
    tokens = 0
    started = time.perf_counter()
    for first in range(0, len(order), ROWS_PER_STEP):
        samples = [sample for row in order[first : first + ROWS_PER_STEP] for sample in rows[int(row)]]
        for members in pack_into_micro_batches(samples, TOKENS_PER_PACK):
            tokens += len(collate([samples[i] for i in members]).tokens)
    seconds = time.perf_counter() - started
    print(f"data read: {len(rows):,} rows opened and checked in {opened:.2f} s ({tokens / opened:,.0f} tokens/s)")
    print(
        f"data read, {tokens / len(rows):.0f} tokens a row, packed batches: {tokens / seconds:,.0f} tokens/s, one core"
    )


# Memory


def stream(folder: Path, source: Path, tokenizer, megabytes: float) -> None:
    """Preprocess files of two sizes in separate processes and print their peak memory."""
    context = multiprocessing.get_context("spawn")
    peaks = []
    for part in (megabytes / 10, megabytes):
        peak = context.Queue()
        config = configuration(folder / f"stream-{part}", shortened(source, part), workers=1)
        child = context.Process(target=streamed, args=(config, tokenizer, peak))
        child.start()
        peaks.append(peak.get(timeout=24 * 3600))
        child.join()
    smaller, larger = (f"{peak:.0f} MB" for peak in peaks)
    print(f"data memory: at most {smaller} for a file of {megabytes / 10:,.0f} MB, {larger} for {megabytes:,.0f} MB")


def shortened(source: Path, megabytes: float) -> Path:
    if source.stat().st_size <= megabytes * 1.05e6:
        return source
    short = source.with_name("short.jsonl")
    with source.open("rb") as lines, short.open("wb") as out:
        while out.tell() < megabytes * 1e6:
            out.write(lines.readline())
    return short


def streamed(config: PreprocessConfig, tokenizer, peak) -> None:
    preprocess(config, tokenizer, lambda _: None)
    # Linux keeps the largest memory of the process that started this one in getrusage, but not here.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak.put(next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")))
