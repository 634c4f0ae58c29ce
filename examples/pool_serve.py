"""Answer HTTP requests: those that come within 5 ms are computed as one batch on a free device.

python examples/pool_serve.py                    asks itself from 16 threads, and ends
python examples/pool_serve.py --port 8000 --requests 0
curl --data '[0.1, 0.2, 0.3, 0.4]' http://127.0.0.1:8000
"""

import argparse
import concurrent.futures
import http.client
import http.server
import json
import statistics
import threading
import time

import torch
from torch import nn

import dataparallel as dp

WIDTH, CLIENTS = 4, 16


class Server(http.server.ThreadingHTTPServer):
    """A server with a thread for each connection, for more clients than by default."""

    request_queue_size = 128


def make_handler(pool: dp.Pool) -> type[http.server.BaseHTTPRequestHandler]:
    """Return what answers one request; each has a thread of its own, which waits meanwhile."""

    class Handler(http.server.BaseHTTPRequestHandler):
        wbufsize = -1  # the whole answer in one packet

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                row = torch.tensor(json.loads(text), dtype=torch.float32).view(1, WIDTH)
                status, answer = 200, pool.submit(row).result()[0].tolist()
            except (ValueError, TypeError, RuntimeError) as error:
                status, answer = 400, str(error)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Write nothing for each request."""

    return Handler


def ask(address: tuple[str, int], row: list[float]) -> tuple[list[float], float]:
    """Send one request; return the answer and the seconds that it took."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("POST", "/", json.dumps(row))
    answer = json.load(connection.getresponse())
    return answer, time.perf_counter() - begin


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 3), nn.Softmax(1)).eval()
    sizes = []
    net.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    devices = options.devices.split(",") if options.devices else dp.accelerators() or ["cpu", "cpu"]
    with (
        dp.Pool(net, devices, max_batch=32, max_wait=0.005) as pool,
        Server(("127.0.0.1", options.port), make_handler(pool)) as server,
    ):
        address = "127.0.0.1", server.server_port
        print(f"answering at {address} on: {', '.join(map(str, devices))}", flush=True)
        if not options.requests:
            server.serve_forever()
        threading.Thread(target=server.serve_forever).start()
        rows = torch.rand(options.requests, WIDTH).tolist()
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
            found = list(clients.map(lambda row: ask(address, row), rows))
        server.shutdown()
    seconds = sorted(second for _, second in found)
    print(f"{len(found)} requests in {len(sizes)} batches of up to {max(sizes)}")
    print(f"latency: median {1e3 * statistics.median(seconds):.1f} ms, "
          f"99% within {1e3 * seconds[int(0.99 * len(seconds))]:.1f} ms")  # fmt: skip

    with torch.inference_mode():
        bare = net.cpu()(torch.tensor(rows))
    answers = torch.tensor([answer for answer, _ in found])
    print(f"largest difference to the bare module: {(answers - bare).abs().max():.1e}")


def parse_options() -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--devices", help="one for each batch at a time: cpu,cpu or cuda:0,cuda:1")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--requests", type=int, default=400, help="0: serve until Ctrl-C")
    return parser.parse_args()


if __name__ == "__main__":
    main()
