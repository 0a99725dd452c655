import os, socket, mpiddp
mpiddp.init()
import torch.distributed as d, torch
t=torch.ones(1); d.all_reduce(t)
print(socket.gethostname(), d.get_rank(), d.get_world_size(), t.item(), os.environ.get("FOO"))
mpiddp.close() if hasattr(mpiddp,"close") else None
