export TILEWRIGHT_CACHE_DIR=/tmp/cache-block
timeout 28 python build/wt/block/build_gpu/blocktime.py main 2>&1 | tail -45
timeout 45 python -m pytest -q -p no:cacheprovider --rootdir build/wt/block build/wt/block/tests/gpu/test_joined_gpu.py 2>&1 | tail -25
