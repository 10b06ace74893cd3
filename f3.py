import torch, vitrify
x = torch.ones(2, 2, requires_grad=True); w = torch.ones(2, 2, requires_grad=True)
y = vitrify.compile(lambda x, w: torch.complex(x, w).conj())(x, w)
t = torch.ones(2, 2, 2, dtype=torch.complex64)[..., 0].detach()
print(torch.autograd.grad(y, [x, w], t, retain_graph=True))
t2 = torch.ones(2, 2, dtype=torch.complex64)
print(torch.autograd.grad(y, [x, w], t2, create_graph=True))
for f in (lambda x, w: torch.complex(x, w).conj() * 2, lambda x, w: torch.complex(x, w), lambda x, w: torch.complex(x * 2, w).conj(), lambda x, w: torch.complex(x * 2, w * 3).conj()):
    y = vitrify.compile(f)(x, w)
    try: print(torch.autograd.grad(y, [x, w], t, create_graph=True))
    except Exception as e: print(str(e)[:80])
