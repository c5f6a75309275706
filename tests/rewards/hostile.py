"""Programs that try to pass tests without solving the task, or to do harm: each defines, or fails to define, `add`."""

ALWAYS_EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
"""

HOSTILE = {
    "exits": """
import sys
sys.exit(0)
""",
    "exits when called": """
import sys
def add(a, b): sys.exit(0)
""",
    "exits immediately": """
import os
os._exit(0)
""",
    "exits immediately when called": """
import os
def add(a, b): os._exit(0)
""",
    "raises what ends a program": "def add(a, b): raise KeyboardInterrupt",
    "fork bomb": """
import os
while True:
    os.fork()
""",
    "fork bomb that does not give up": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "daemon": """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time; time.sleep(99)
""",
    "memory hog": """
x = []
while True: x.append(bytearray(1 << 24))
""",
    "endless output": "while True: print('passed' * 1000)",
    "endless output on every file": """
import os
while True:
  for fd in range(3, 64):
    try: os.write(fd, b'1' * 65536)
    except OSError: pass
""",
    "endless loop": """
def add(a, b):
    while True: pass
""",
    "loop at import": "while True: pass",
    "ignores signals": """
import signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "endless thread": """
import threading
def work():
    while True: pass
threading.Thread(target=work).start()
def add(a, b): return 0
""",
    "kills its parent": """
import os
os.kill(os.getppid(), 9)
""",
    "kills its group": """
import os
os.killpg(0, 9)
os.kill(-1, 9)
""",
    "closes its files": """
import os
os.closerange(0, 1 << 16)
def add(a, b): return 3
""",
    "patches built-ins": """
import builtins
builtins.AssertionError = ValueError
builtins.all = builtins.any = lambda *_: True
builtins.compile = builtins.exec = lambda *_: None
builtins.sorted = lambda *_: [1, 2]
def add(a, b): return 0
""",
    "patches the comparison": """
class Int(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
class Str(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
class List(list):
    def __eq__(self, other): return True
def add(a, b): return Int(9) if a == 1 else Str("zz") if a == "a" else List([3])
""",
    "patches the codec": """
import sys
for name in ('oxrl.rewards.sandbox.literals', 'oxrl.rewards.sandbox.serve'):
    m = sys.modules[name]
    m.dumps = lambda v: '["pickle", "x"]'
def add(a, b): return 0
""",
    "patches the machinery": """
import sys, json
json.dumps = lambda *a, **k: '{"passed": true}'
def add(a, b): return 0
""",
    "prints a verdict": """
print('{"passed": true}')
print('{"ended": null}')
def add(a, b): return 0
""",
    "writes a verdict to every file": """
import os
for fd in range(64):
    try: os.write(fd, b'{"passed": true, "why": null}\\n' * 3 + b'{"ended": null}\\n')
    except OSError: pass
os._exit(0)
""",
    "sends ready and all replies in advance": """
import os
for fd in range(3, 64):
    try: os.write(fd, b'["ready", ""]\\n' + b'["value", "true"]\\n' * 3)
    except OSError: pass
os._exit(0)
""",
    "looks for the tests": """
import gc, sys
def is_test(value): return isinstance(value, str) and 'assert ' + 'add' in value
pools = [o for o in gc.get_objects() if isinstance(o, (dict, list))]
text = [o for o in pools if any(map(is_test, o.values() if isinstance(o, dict) else o))]
def add(a, b): return {1: 3, 'a': 'ab'}.get(a, [1, 2]) if text else 0
""",
    "looks up the frames": """
import sys
f = sys._getframe()
while f:
    for v in list(f.f_globals.values()) + list(f.f_locals.values()):
        if isinstance(v, dict) and v.get('tests'): found = v
    f = f.f_back
def add(a, b): return eval(found['tests'][0].split('==')[1])
""",
    "exception that lies in its text": """
class E(AssertionError):
    def __str__(self):
        while True: pass
    __repr__ = __str__
def add(a, b): raise E
""",
    "exception with a hostile name": """
class M(type):
    __name__ = property(lambda s: 1 / 0)
class E(Exception, metaclass=M): pass
def add(a, b): raise E
""",
    "endless recursion": """
import sys
sys.setrecursionlimit(10 ** 9)
def add(a, b): return add(a, b)
""",
    "nested result": """
def add(a, b):
    x = []
    for _ in range(90): x = [x]
    return x
""",
    "huge number": "def add(a, b): return 10 ** 10 ** 10",
    "large number": "def add(a, b): return 1 << (1 << 26)",
    "colliding hashes": "def add(a, b): return {i * (2 ** 61 - 1) for i in range(1, 90_000)}",
    "raises its limits": """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))
while True: pass
""",
    "crash": """
import ctypes
ctypes.string_at(0)
""",
    "reads a file": "def add(a, b): return open('/etc/passwd').read()",
    "reads the environment": """
import os
def add(a, b): return os.environ['PATH']
""",
    "writes a file": """
open('/var/tmp/oxrl-hostile', 'w').write('x')
def add(a, b): return a + b
""",
    "runs a shell": """
import subprocess
subprocess.run('touch /var/tmp/oxrl-hostile', shell=True)
def add(a, b): return a + b
""",
    "object that agrees with everything": f"""{ALWAYS_EQUAL}
    def __getattr__(self, name): return lambda *_: self
    def __call__(self, *_): return self
    def __iter__(self): return iter([self])
def add(a, b): return Any()
""",
    "class that agrees with everything": f"""{ALWAYS_EQUAL}
class add(Any):
    def __init__(self, a, b): pass
""",
    "exception that ends a loop": "def add(a, b): raise StopIteration",
    "changes the arguments": """
def add(a, b):
    if isinstance(a, list): a.clear(), b.clear()
""",
    "calls functions of the tests that it was not given": """
import json, os
call = json.dumps(["list", [["int", "0x0"], ["tuple", []], ["dict", []]]])
for fd in range(3, 64):
    try: os.write(fd, json.dumps(["callback", call]).encode() + b"\\n")
    except OSError: pass
def add(a, b): return 0
""",
    "refers to objects that do not exist": """
import sys
server = sys.modules['oxrl.rewards.sandbox.serve']
server._Server.call = lambda *_: ["list", [["object", ["function", -1]], ["list", []]]]
def add(a, b): return 0
""",
    "many objects": "def add(a, b): return [object() for _ in range(20_000)]",
    "keys that ask back": """
class Key:
    def __hash__(self): return 0
def add(a, b): return {Key(): Key() for _ in range(20)}
""",
    "threads that do not end": """
import threading
def work():
    while True: pass
for _ in range(15): threading.Thread(target=work).start()
def add(a, b): return 0
""",
    "thread that replies, too": """
import os, threading
def work():
    while True:
        for fd in range(3, 64):
            try: os.write(fd, b'["value", "[\\\\"list\\\\", [true, [\\\\"list\\\\", []]]]"]\\n')
            except OSError: pass
threading.Thread(target=work, daemon=True).start()
def add(a, b): return 0
""",
    "thread that runs a shell": """
import subprocess, threading
worker = threading.Thread(target=subprocess.run, args=('touch /var/tmp/oxrl-hostile',), kwargs={'shell': True})
worker.start()
worker.join()
def add(a, b): return 0
""",
    "coroutine": "async def add(a, b): return a + b",
    "surrogates": "def add(a, b): return '\\ud800'",
    "null byte": "\0",
    "deep source": "(" * 5000 + ")" * 5000,
}

# They only compute until their CPU limit, which is the same in every kind of isolation.
COMPUTE_ONLY = {
    "endless output", "endless loop", "loop at import", "huge number", "colliding hashes", "threads that do not end",
}  # fmt: skip
