# make demo: the main job on a real model. make test: lint, types, every test. Both set up what they need in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
MODEL  ?= smollm2-135m-instruct
BUNDLE ?= bundles/$(MODEL)
ROOMS   = exporter graph_passes plugins runtime
# A newer torch for Linux brings several GB of CUDA libraries that nothing here uses.
TORCH  ?= torch==2.13.0

.PHONY: demo test setup lint types pytest native wheel sanitize clean

demo: setup
	$(BIN)/specexport build $(MODEL) --output $(BUNDLE) --force
	$(BIN)/specexport generate $(BUNDLE) --chat "Write three sentences about the sea."
	$(BIN)/specexport compare $(BUNDLE) --tokens 2048

test: lint types pytest

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard plugins/*/*.cc plugins/*/*.h plugins/*/*.inl)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[export,dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The rooms install as specexport.*; a tree of links shows mypy the same.
types: setup
	mkdir -p build/types/specexport
	for room in $(ROOMS); do ln -sfn ../../../$$room build/types/specexport/$$room; done
	MYPYPATH=build/types $(BIN)/mypy --explicit-package-bases --namespace-packages $(addprefix -p specexport.,$(ROOMS))

pytest: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# The custom-op library beside its sources, for working on the kernels without reinstalling.
native:
	cmake -S . -B build/native -G Ninja
	cmake --build build/native
	cmake --install build/native --prefix . --component inplace

wheel: setup
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf build dist bundles $(VENV) plugins/native/*.so
