"""How the nodes reach each other: interfaces, names of addresses, links, clocks."""

from __future__ import annotations

from dataclasses import dataclass

from mpiddp.doctor.examiner.examiner import Examiner
from mpiddp.doctor.examiner.findings import Finding
from mpiddp.doctor.network import name_resolution, node_links, routes
from mpiddp.launch.network.interface_rule import find_rule
from mpiddp.launch.network.interfaces import list_interfaces
from mpiddp.launch.rendezvous.route import Route


@dataclass(frozen=True)
class NetworkRow:
    way: routes.Way
    look_ups: Finding
    link: node_links.NodeLinks | None
    """None if the job has one node."""


def examine_network(examiner: Examiner, route: Route) -> bool:
    """Whether all nodes that were tried reach each other. Collective."""
    finding: Finding | None = None
    rows = examiner.gather_nodes(_find_row(examiner, route)) if examiner.leads_node else None
    if rows is not None:
        ways = routes.judge_ways([row.way for row in rows])
        examiner.add_merged([[each] for each in ways])
        examiner.add_merged([[row.look_ups] for row in rows])
        measured = [row.link for row in rows if row.link is not None]
        finding = routes.judge_links(measured, [row.way for row in rows])
        examiner.add(finding)
        examiner.add(routes.judge_clocks(measured))
    return examiner.control.broadcast(finding is None or finding.code == 0)


def _find_row(examiner: Examiner, route: Route) -> NetworkRow:
    """This node's. Collective over the nodes' leaders."""
    world, leaders = examiner.world, examiner.leaders
    rule = find_rule(examiner.settings.interface, world.hostname, examiner.before)
    way = routes.find_way(
        route.interface,
        route.local_address,
        route.meeting.address,
        list_interfaces(),
        route.variables,
        chosen_by_user=rule is not None,
    )
    peers = [route.meeting.address]
    if leaders is not None and leaders.Get_size() > 1:
        peers.append(node_links.find_neighbours(leaders, route.local_address))
        everyone = examiner.gather_nodes(route.local_address)
        peers += name_resolution.choose_sample(everyone) if everyone is not None else []
    look_ups = name_resolution.begin_look_ups(peers)
    link = None
    if leaders is not None and leaders.Get_size() > 1:
        token = bytes.fromhex(route.meeting.job)
        server = node_links.LinkServer(route.local_address, token)
        try:
            link = node_links.measure(leaders, server, world.hostname, token)
        finally:
            server.close()
    unanswered = list(name_resolution.find_unanswered(look_ups))
    return NetworkRow(way, name_resolution.judge_look_ups(unanswered), link)
