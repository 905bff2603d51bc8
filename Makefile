# Forebay's front door. Each target sets up whatever it needs; nothing else has to be installed by hand.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python -P
# The plugins are commands of the environment, which protoc looks for in PATH.
protoc = PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m grpc_tools.protoc -I. --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) scheduler/contracts/v1/*.proto
SHELL_FILES = $(shell git ls-files '*.sh' '.ci/*' | grep -v '\.py$$')

.PHONY: docs help demo up test test-unit test-pyslurm check proto format clean setup setup-demo

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup-demo:
	@.ci/debian-packages --demo --optional
	@.ci/setup demo

setup:
	@.ci/debian-packages
	@.ci/setup all

demo: setup-demo ## a real Slurm cluster, real vLLM replicas, a spike, and the bill, in one go (SLURM=embedded: without root)
	@$(PY) -m forebay demo

up: setup-demo ## the same, kept running, with examples to paste
	@$(PY) -m forebay up --demo-cluster

test: setup ## every test, on the real services
	.ci/test

test-unit: ## the tests of milliseconds alone
	.ci/test unit

test-long: setup ## the tests that take minutes each, and forty times the examples for each property
	.ci/test long

test-pyslurm: setup ## the Slurm contract suite on pyslurm, inside a Slurm 26.05 root
	.ci/forky
	.ci/pyslurm

check: setup ## what CI checks besides the tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	shellcheck $(SHELL_FILES)
	luacheck --config slurm_plugins/hooks/.luacheckrc slurm_plugins/hooks
	$(MAKE) --no-print-directory proto-current

.PHONY: prove-gpu-hour
prove-gpu-hour: setup ## a real hour on a real Slurm cluster: GPU minutes add up and sacct -D agrees (MINUTES=60, BATCH_TOKENS=0: batch in the gaps; as root)
	@.venv/bin/python -m tests.bench.gpu_hour --minutes $(or $(MINUTES),60) $(if $(BATCH_TOKENS),--batch-tokens $(BATCH_TOKENS))

.PHONY: bench-gateway
bench-gateway: setup ## CPU, latency and memory a request and a token, beside vllm-router, smg and LiteLLM (QUICK=1, PREFIX=3000: prefix routing too, REPORT=1)
	@.ci/bench-env
	@$(if $(REPORT),build/bench-forebay/bin/python -m tests.bench.gateway_inside --report docs/bench/gateway.md >/dev/null)
	@$(if $(REPORT),build/bench-forebay/bin/python -m tests.bench.gateway_lines --report docs/bench/gateway.md >/dev/null)
	@build/bench-forebay/bin/python -m tests.bench.gateway $(if $(QUICK),--quick) $(if $(PREFIX),--prefix $(PREFIX)) $(if $(REPORT),--report docs/bench/gateway.md)

.PHONY: bench-prefix
bench-prefix: setup ## cached prompt tokens and TTFT on real vLLM: random, round-robin, vllm-router, Forebay, an oracle (REQUESTS=3000, REPORT=1)
	@.ci/bench-env
	@.venv/bin/python -m tests.bench.prefix --requests $(or $(REQUESTS),3000) $(if $(REPORT),--report docs/bench/prefix.md)

.PHONY: bench-admission
bench-admission: setup ## what admission costs a request with a free seat, and behind 1,000 to 100,000 that wait
	@.venv/bin/python -m tests.bench.admission

.PHONY: bench-routing
bench-routing: setup ## what a routing decision, a view and a fingerprint cost with 350 replicas and 50 adapters (REPORT=1)
	@.ci/bench-env
	@build/bench-forebay/bin/python -m tests.bench.routing $(if $(REPORT),--report docs/bench/routing.md)

.PHONY: bench-accounting
bench-accounting: setup ## a month of 100 million usage rows: to write, keep and bill, beside PostgreSQL, SQLite and plain DuckDB (ROWS=1000000, REPORT=1)
	@.venv/bin/python -m tests.bench.accounting --rows $(or $(ROWS),100000000) $(if $(REPORT),--report docs/bench/accounting.md)

.PHONY: bench-batch
bench-batch: setup ## batch jobs beside vllm run-batch on real vLLM, with preemptions, and a million lines on an instant engine (LINES=2000, ROUNDS=1, ALONE=1000000, BIG=10000000, WAY=4000, each 0 to leave it out; REPORT=1)
	@.venv/bin/python -m tests.bench.batch --lines $(or $(LINES),2000) --rounds $(or $(ROUNDS),1) --path $(or $(WAY),4000) --alone $(or $(ALONE),1000000) --big $(or $(BIG),10000000) $(if $(REPORT),--report docs/bench/batch.md)

.PHONY: bench-reclaim
bench-reclaim: setup ## how fast batch GPUs come back by rung, beside Slurm's own preemption; real Slurm and vLLM (TRIALS=100, LEASES=20, REPORT=1)
	@.venv/bin/python -m tests.bench.reclaim --trials $(or $(TRIALS),100) --leases $(or $(LEASES),20) $(if $(REPORT),--report docs/bench/reclaim.md)

.PHONY: bench-models
bench-models: setup ## rollouts under load: back by hand and by itself, failed requests, how soon a route is seen, staging, adapters; on real vLLM and Slurm too, as root (ROUNDS=5, GB=1, ADAPTERS=20, VLLM=3, REPORT=1)
	@.venv/bin/python -m tests.bench.models --rounds $(or $(ROUNDS),5) --gb $(or $(GB),1) --adapters $(or $(ADAPTERS),20) --vllm $(or $(VLLM),3) $(if $(REPORT),--report docs/bench/models.md)

.PHONY: bench-staging
bench-staging: setup ## weights from a folder and from S3 to a disk, beside a copy and boto3 (GB=1, ROUNDS=5)
	@.venv/bin/python -m tests.bench.models_staging --gb $(or $(GB),1) --rounds $(or $(ROUNDS),5)

.PHONY: bench-warm-start
bench-warm-start: setup ## from order to first token on real vLLM: out of a parked process, and without (TRIALS=20, COMPILED=1, REPORT=1)
	@.venv/bin/python -m tests.bench.warm_start --trials $(or $(TRIALS),20) $(if $(COMPILED),--compiled) $(if $(REPORT),--report docs/bench/warm-start.md)

.PHONY: bench-quota
bench-quota: setup ## what a claim on quotas, a refusal and an exchange with the registry cost
	@.venv/bin/python -m tests.bench.quota_book

.PHONY: proto-current
proto-current: ## the generated code is what the .proto files say
	@d=$$(mktemp -d) && trap 'rm -rf "$$d"' EXIT && $(call protoc,"$$d") && \
	for f in "$$d"/scheduler/contracts/v1/*; do cmp "$$f" "scheduler/contracts/v1/$$(basename "$$f")" || exit 1; done

proto: ## generate the protocol code again
	$(call protoc,.)

docs: ## write docs/forebay.toml from the settings' own declarations
	$(PY) -m forebay config example > docs/forebay.toml

format: ## put the code in order
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## remove what was built here
	rm -rf build .venv .venv-vllm-*

.PHONY: bench-calibration
bench-calibration: setup ## the simulator's engine beside real vLLM on this machine, which must be quiet (ROUNDS=7, REPORT=1)
	@.venv/bin/python -m tests.bench.calibration --rounds $(or $(ROUNDS),7) $(if $(REPORT),--report docs/bench/simulation.md)

.PHONY: simulate-day
simulate-day: setup ## a simulated day of two sites, policies side by side (30 minutes; QUICK=1, REPORT=1)
	@.venv/bin/python -m tests.bench.simulation $(if $(QUICK),--quick) $(if $(REPORT),--report docs/bench/simulation.md)
