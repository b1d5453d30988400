"""The tensor store: a process on each node that owns model weights; engines attach to them without a copy.

What an engine imports, stdlib only: `wire` the frames and who is at the other end, `client` the requests and the
mappings; on GPUs also `cuda`, with torch.

What the store is made of: `manifest` which shards there are and what is in them, `parts` what is loaded as one piece,
`sources` where bytes are, `hosts` where they may come from, `fetch` bringing them, `regions` memory of the node that
holds a part (`cuda` of a GPU), `ledger` who holds how much, `requests` what may be asked, `store` all of it together,
`server` the socket, `service` the process.
"""
