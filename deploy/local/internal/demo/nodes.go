package demo

import (
	"context"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	agentv1 "github.com/eniplane/eniplane/gen/eniplane/agent/v1"
	nodev1 "github.com/eniplane/eniplane/gen/eniplane/node/v1"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

// state is a node as four parties see it.
type state struct {
	object ciliumnode.CiliumNode // the API server
	view   *nodev1.NodeView      // node-syncer
	ips    []*agentv1.IPState    // its agent
	router string
}

// settled tells whether all parties agree: the object lists as used what the
// agent gave, and keeps the two addresses free that the node wants.
func (s state) settled() bool {
	used, free := s.counts()
	return s.router != "" && used == len(s.object.Status.IPAM.Used) && used+free == len(s.object.Spec.IPAM.Pool) &&
		len(s.view.GetPool()) == len(s.object.Spec.IPAM.Pool) && len(s.view.GetEnis()) == len(s.object.Status.ENI.ENIs) && free >= preAllocate
}

// preAllocate is what the stack's agents want free at least.
const preAllocate = 2

// counts returns how many addresses are used, and how many of the pool free.
func (s state) counts() (int, int) {
	used, free := 0, 0
	for _, ip := range s.ips {
		switch {
		case ip.GetOwner() != "":
			used++
		case ip.GetInPool():
			free++
		}
	}
	return used, free
}

func (d *demo) read(ctx context.Context, node string) (state, error) {
	var s state
	object, err := d.stack.Kube().Dynamic.Resource(ciliumnode.GVR()).Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return s, err
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &s.object); err != nil {
		return s, err
	}
	got, err := d.syncer.GetNode(ctx, &nodev1.GetNodeRequest{NodeName: node})
	if err != nil {
		return s, err
	}
	s.view = got.GetNode().GetView()
	ips, err := d.agents[node].ListIPs(ctx, &agentv1.ListIPsRequest{})
	if err != nil {
		return s, err
	}
	s.ips = ips.GetIps()
	for _, ip := range s.ips {
		if ip.GetOwner() == "router" {
			s.router = ip.GetAddress()
		}
	}
	return s, nil
}

// showNodes prints the ENIs and addresses of each node once they have settled.
func (d *demo) showNodes(ctx context.Context) error {
	var enis, totals [][]string
	for _, node := range d.nodes {
		var s state
		err := until(ctx, func(ctx context.Context) (bool, error) {
			var err error
			s, err = d.read(ctx, node)
			return err == nil && s.settled(), err
		})
		used, free := s.counts()
		d.check(err == nil, "%s did not settle: pool of %d, %d used by its agent, %d in its object, %d free: %v",
			node, len(s.object.Spec.IPAM.Pool), used, len(s.object.Status.IPAM.Used), free, err)
		enis = append(enis, d.eniRows(node, s)...)
		totals = append(totals, []string{
			node, s.object.Spec.InstanceID, s.object.Spec.ENI.InstanceType, number(len(s.object.Status.ENI.ENIs)),
			number(len(s.object.Spec.IPAM.Pool)), number(used), number(free), s.router,
		})
		d.checkGiven(node, s)
	}
	d.table("Nodes, as the API server stores them and their agents use them", []string{"NODE", "INSTANCE", "TYPE", "ENIS", "POOL", "USED", "FREE", "ROUTER"}, totals)
	d.table("Their ENIs", []string{"NODE", "ENI", "INDEX", "SUBNET", "PRIMARY", "POOL", "USED BY"}, enis)
	return nil
}

func (d *demo) eniRows(node string, s state) [][]string {
	pool, owners := make(map[string]int), make(map[string][]string)
	for _, a := range s.object.Spec.IPAM.Pool {
		pool[a.Resource]++
	}
	for _, ip := range s.ips {
		if ip.GetOwner() != "" {
			owners[ip.GetEniId()] = append(owners[ip.GetEniId()], ip.GetOwner())
		}
	}
	var rows [][]string
	for _, e := range s.view.GetEnis() {
		by := "-"
		if o := owners[e.GetId()]; len(o) > 0 {
			by = strings.ReplaceAll(strings.Join(sorted(o), " "), namespace+"/", "")
		}
		rows = append(rows, []string{
			node, e.GetId(), number(e.GetDeviceIndex()), e.GetSubnet().GetCidr(), e.GetIp(), number(pool[e.GetId()]), by,
		})
	}
	slices.SortFunc(rows, func(a, b []string) int { return strings.Compare(a[2], b[2]) })
	return rows
}

// checkGiven compares what pods were told with what the object holds.
func (d *demo) checkGiven(node string, s state) {
	enis := make(map[string]bool)
	for _, g := range d.given {
		if g.node != node {
			continue
		}
		enis[g.eni] = true
		d.check(s.object.Spec.IPAM.Pool[g.address].Resource == g.eni, "%s was given %s of %s; the pool says %q", g.pod, g.address, g.eni, s.object.Spec.IPAM.Pool[g.address].Resource)
		d.check(s.object.Status.IPAM.Used[g.address].Owner == namespace+"/"+g.pod, "%s was given %s; the object says that %q uses it", g.pod, g.address, s.object.Status.IPAM.Used[g.address].Owner)
	}
	if node == d.nodes[0] {
		d.check(len(s.object.Status.ENI.ENIs) >= 2, "%s has %d ENIs; its pods do not fit on one", node, len(s.object.Status.ENI.ENIs))
	}
}

// showVersions prints how many versions of the objects the API server stored,
// and how many of them were inconsistent.
func (d *demo) showVersions(context.Context) error {
	o := d.stack.Observer()
	versions, findings := o.Versions(), o.Findings()
	bad := make(map[string]int)
	for _, f := range findings {
		bad[f.Node]++
		d.check(false, "version %s of CiliumNode %s is inconsistent: %v", f.Revision, f.Node, f.Violations)
	}
	var rows [][]string
	for _, node := range d.nodes {
		d.check(versions[node] > 2, "%d versions of CiliumNode %s were observed", versions[node], node)
		rows = append(rows, []string{node, number(versions[node]), number(bad[node])})
	}
	d.check(o.Missed() == 0, "the observer missed versions %d times", o.Missed())
	d.table(fmt.Sprintf("Versions of the CiliumNode objects, all %d of them seen by an observer", total(versions)),
		[]string{"NODE", "VERSIONS", "INCONSISTENT"}, rows)
	return nil
}

func total(counts map[string]int) int {
	sum := 0
	for _, n := range counts {
		sum += n
	}
	return sum
}
