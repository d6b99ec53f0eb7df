"""Matrix products on any GPU: warps copy and multiply, by `mma` instructions or plain `fma`."""
