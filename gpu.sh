export TILEWRIGHT_CACHE_DIR=/tmp/cache-block
timeout 15 python build/wt/block/build_gpu/plain.py 2>&1 | tail -12
(cd build/wt/block && PYTHONPATH=src:.:../../carry timeout 25 python -m bench.run transformer --op transformer_block --quick 2>&1 | tail -6)
TILEWRIGHT_CACHE_DIR=/tmp/cache-block-t timeout 16 python build/wt/block/build_gpu/tuneblock.py downnorm 11 2>&1 | tail -8
TILEWRIGHT_CACHE_DIR=/tmp/cache-block-t timeout 16 python build/wt/block/build_gpu/tuneblock.py up 11 2>&1 | tail -8
TILEWRIGHT_CACHE_DIR=/tmp/cache-block-t timeout 16 python build/wt/block/build_gpu/tuneblock.py attend 11 2>&1 | tail -8
