export TILEWRIGHT_CACHE_DIR=/tmp/cache-block
timeout 25 python build/wt/block/build_gpu/nests.py 2>&1 | tail -22
timeout 25 python build/wt/block/build_gpu/blocktime.py main 2>&1 | grep -v "^  \|torch [qanoud]" | tail -14
(cd build/wt/block && PYTHONPATH=src:.:../../carry timeout 24 python -m pytest -q -p no:cacheprovider tests/gpu/test_joined_gpu.py 2>&1 | tail -5)
