package account

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/limits"
)

// tokenLifetime is how long a client token is remembered.
const tokenLifetime = 24 * time.Hour

// terminatedVisible is how long a terminated instance can still be described;
// EC2 says "approximately one hour".
const terminatedVisible = time.Hour

// Account is the simulated account. Its methods may be called concurrently;
// each is one atomic step that either happens completely or not at all.
type Account struct {
	now func() time.Time

	mu sync.Mutex // guards state
	state
}

// state is what the mutex guards. Its methods expect the mutex to be held.
type state struct {
	journal journal

	region   string
	owner    string
	seed     uint64
	limits   *limits.Table
	revision uint64
	counters map[string]uint64

	vpcs        *table[VPCID, VPC]
	subnets     *table[SubnetID, Subnet]
	groups      *table[GroupID, SecurityGroup]
	routeTables *table[RouteTableID, RouteTable]
	instances   *table[InstanceID, Instance]
	enis        *table[ENIID, NetworkInterface]
	tokens      *table[string, token]
	attachments *table[AttachmentID, ENIID]

	used   map[SubnetID]map[netip.Addr]ENIID
	seeder *seeder
}

// token remembers a request that carried a ClientToken, and its outcome.
type token struct {
	fingerprint string
	expires     time.Time
	eni         NetworkInterface // as created, for CreateNetworkInterface
	instances   []InstanceID     // for RunInstances
}

// New makes an account with the resources of the topology. The clock is read
// once for each operation. Equal topologies, seeds and operations make equal
// accounts.
func New(topology Topology, seed uint64, now func() time.Time) (*Account, error) {
	types, err := limits.Load()
	if err != nil {
		return nil, err
	}
	a := &Account{now: now}
	s := &a.state
	j := &s.journal
	s.seed, s.limits, s.counters = seed, types, make(map[string]uint64)
	s.vpcs = newTable[VPCID, VPC](j)
	s.subnets = newTable[SubnetID, Subnet](j)
	s.groups = newTable[GroupID, SecurityGroup](j)
	s.routeTables = newTable[RouteTableID, RouteTable](j)
	s.instances = newTable[InstanceID, Instance](j)
	s.enis = newTable[ENIID, NetworkInterface](j)
	s.tokens = newTable[string, token](j)
	s.attachments = newTable[AttachmentID, ENIID](j)
	s.used = make(map[SubnetID]map[netip.Addr]ENIID)
	if err := s.seedFrom(topology, now()); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	j.forget()
	return a, nil
}

// Region is the name of the simulated region.
func (a *Account) Region() string { return a.region }

// Owner is the twelve-digit account id.
func (a *Account) Owner() string { return a.owner }

// Snapshot copies the account's present state, whatever Describe may show.
func (a *Account) Snapshot() Snapshot {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Snapshot{
		Region: a.region, Account: a.owner, Revision: a.revision,
		VPCs: a.vpcs.all(), Subnets: a.subnets.all(), SecurityGroups: a.groups.all(), RouteTables: a.routeTables.all(),
		Instances: a.instances.all(), NetworkInterfaces: a.enis.all(),
	}
}

// Metadata is what an instance can learn about itself.
type Metadata struct {
	InstanceDetail
	Subnets map[SubnetID]Subnet // of the attached interfaces
	VPCs    map[VPCID]VPC       // of the attached interfaces
}

// Metadata returns what the metadata service of an instance serves, and false
// if the instance does not exist or is terminated.
func (a *Account) Metadata(id InstanceID) (Metadata, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	instance, ok := a.instances.get(id)
	if !ok || instance.State == StateTerminated {
		return Metadata{}, false
	}
	m := Metadata{InstanceDetail: a.detail(instance), Subnets: make(map[SubnetID]Subnet), VPCs: make(map[VPCID]VPC)}
	for _, eni := range m.Attached {
		m.Subnets[eni.Subnet], _ = a.subnets.get(eni.Subnet)
		m.VPCs[eni.VPC], _ = a.vpcs.get(eni.VPC)
	}
	return m, true
}

// Living lists the instances that are not terminated, by id.
func (a *Account) Living() []InstanceID {
	a.mu.Lock()
	defer a.mu.Unlock()
	var ids []InstanceID
	for _, id := range a.instances.keys {
		if instance, _ := a.instances.get(id); instance.State != StateTerminated {
			ids = append(ids, id)
		}
	}
	return ids
}

// mutate runs fn as one step: an error, or a dry run, leaves no trace.
func (a *Account) mutate(dryRun bool, fn func(s *state, now time.Time) *Error) *Error {
	now := a.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	s := &a.state
	counters := maps.Clone(s.counters)
	err := fn(s, now)
	if err == nil && dryRun {
		err = dryRunSucceeded()
	}
	if err != nil {
		s.journal.rollback(0)
		s.counters = counters
		return err
	}
	if s.journal.mark() > 0 {
		s.revision++
	}
	s.journal.forget()
	return nil
}

// read runs fn on what Describe operations see. It is the only way from a
// Describe operation to the rows, and so the place where an older view of them
// would be served.
func (a *Account) read(dryRun bool, fn func(s *state, now time.Time) *Error) *Error {
	if dryRun {
		return dryRunSucceeded()
	}
	now := a.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	return fn(&a.state, now)
}

// recall looks for an earlier request of the same action with the same client
// token. It returns false if there is none, and an error if there was one with
// other parameters. An empty token matches nothing.
func (s *state) recall(action, clientToken, fingerprint string, now time.Time) (token, bool, *Error) {
	if clientToken == "" {
		return token{}, false, nil
	}
	if len(clientToken) > 64 {
		return token{}, false, invalid("Value (%s) for parameter clientToken is invalid. It must have at most 64 characters.", clientToken)
	}
	t, ok := s.tokens.get(action + "/" + clientToken)
	if !ok || now.After(t.expires) {
		return token{}, false, nil
	}
	if t.fingerprint != fingerprint {
		return token{}, false, Errorf("IdempotentParameterMismatch",
			"Arguments on this idempotent request are inconsistent with arguments used in previous request(s).")
	}
	return t, true, nil
}

func (s *state) remember(action, clientToken string, t token) {
	if clientToken != "" {
		s.tokens.put(action+"/"+clientToken, t)
	}
}

// fingerprint is equal for equal requests.
func fingerprint(request any) string {
	text, err := json.Marshal(request)
	if err != nil {
		panic("account: request can not be marshalled: " + err.Error()) // requests are plain structs
	}
	digest := sha256.Sum256(text)
	return hex.EncodeToString(digest[:])
}
