"""Schedules as data: how a loop nest is cut into blocks, tiles and threads. In: text or a choice. Out: records that validate and print themselves."""
