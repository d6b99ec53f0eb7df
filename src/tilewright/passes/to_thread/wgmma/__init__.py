"""Matrix products on Hopper: one warp group copies by TMA, the others multiply by `wgmma`."""
