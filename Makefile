# Stagewire's chores. `make` alone lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak loom fuzz bench peers bench-peers lint format docs requirements clean

help: ## list these targets
	@grep -hE '^[a-z -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+)[a-z -]*:.*## /\1\t/' | expand -t 16

setup: ## private uv, .venv with the Python packages, the release build (no root)
	@scripts/setup

demo: setup ## run the example pipeline in stages and colocated, compare, write out/
	@.venv/bin/python examples/wan/demo.py --out out

test: setup ## all tests: Rust, doctests, Python, end to end (small counts)
	@scripts/test

soak: setup ## the tests with kills, faults and concurrency at full counts
	@STAGEWIRE_SOAK=1 scripts/test

loom: ## the models of shared structures, in every order of their threads (needs no set-up)
	@scripts/loom

fuzz: ## the decoders of bytes from others and the reader of pipeline files, 20 seconds each (needs no set-up but g++)
	@scripts/fuzz

bench: setup ## what a hand-over costs beside a memcpy of the same bytes
	@.venv/bin/stagewire bench quick

peers bench-peers: ## .peers with the wheels of Mooncake and NIXL, for the tests and benchmarks against them (no root)
	@scripts/peers

lint: setup ## formatting, clippy, ruff, mypy, licences, layers, generated code
	@scripts/lint

format: setup ## rustfmt and ruff format
	cargo fmt --all
	.venv/bin/ruff format --quiet .

docs: ## the Rust documentation, warnings are errors
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet

requirements: setup ## pin scripts/requirements.in again
	printf '# Made by `make requirements` from requirements.in. Do not edit.\n' > scripts/requirements.txt
	.tools/uv/bin/uv pip compile --quiet --no-header --no-annotate --python-version 3.11 --universal \
		scripts/requirements.in >> scripts/requirements.txt

clean: ## remove everything that was made here
	rm -rf .tools .venv .peers out target
