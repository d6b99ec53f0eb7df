export TILEWRIGHT_CACHE_DIR=/tmp/cache-block
timeout 25 python build/wt/block/build_gpu/blocktime.py main 2>&1 | tail -45
timeout 22 python build/wt/block/build_gpu/blocktime.py try 2>&1 | tail -20
timeout 26 python build/wt/block/build_gpu/joined.py 2>&1 | tail -40
