import time, sys
import torch, importlib.util
import tilewright as tw
print(tw.__file__)
from tilewright.compile import driver
spec = importlib.util.spec_from_file_location("ex", "examples/transformer.py"); ex = importlib.util.module_from_spec(spec); spec.loader.exec_module(ex)
import ml_dtypes, numpy as np
bf=ml_dtypes.bfloat16
x=np.zeros((4096,768),bf); w=np.zeros((768,2304),bf); b=np.zeros(2304,bf)
def show(k,*a):
    t=time.time(); art=k.compile(*a,target="sm_90a"); print(k.__name__, round(time.time()-t,2)); print(art.schedule); print([ (l.entry,[str(g) for g in l.grid],l.threads,l.dependent) for l in art.launches])
show(ex.project,x,w,b)
q=np.zeros((8,512,3,12,64),bf).transpose(2,0,3,1,4)
show(ex.attend,q[0],q[1],q[2],0.125)
o=np.zeros((768,768),bf); v=np.zeros(768,bf)
show(ex.project_add_norm,x,o,v,x,v,v)
show(ex.project_gelu,x,np.zeros((768,3072),bf),np.zeros(3072,bf))
show(ex.project_add_norm,np.zeros((4096,3072),bf),np.zeros((3072,768),bf),v,x,v,v)
