package account

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"time"
)

// Topology describes what an account holds at the start. Resources refer to
// each other by id or by name; an id that is left out is made up, a name
// becomes the Name tag. Every VPC gets a security group "default" and a main
// route table unless the topology has them.
type Topology struct {
	// Region defaults to us-east-1.
	Region string `json:"region,omitempty"`
	// Account is the twelve-digit account id and defaults to 123456789012.
	Account        string              `json:"account,omitempty"`
	VPCs           []VPCSpec           `json:"vpcs"`
	Subnets        []SubnetSpec        `json:"subnets"`
	SecurityGroups []SecurityGroupSpec `json:"securityGroups,omitempty"`
	RouteTables    []RouteTableSpec    `json:"routeTables,omitempty"`
	Instances      []InstanceSpec      `json:"instances,omitempty"`
}

// VPCSpec is a VPC of a topology.
type VPCSpec struct {
	ID    string            `json:"id,omitempty"`
	Name  string            `json:"name,omitempty"`
	CIDRs []netip.Prefix    `json:"cidrs"` // /16 to /28, the first is the primary one
	Tags  map[string]string `json:"tags,omitempty"`
}

// SubnetSpec is a subnet of a topology.
type SubnetSpec struct {
	ID   string            `json:"id,omitempty"`
	Name string            `json:"name,omitempty"`
	VPC  string            `json:"vpc"`
	CIDR netip.Prefix      `json:"cidr"` // /16 to /28, inside one of the VPC's
	Zone string            `json:"zone"` // the region and a letter
	Tags map[string]string `json:"tags,omitempty"`
}

// SecurityGroupSpec is a security group of a topology.
type SecurityGroupSpec struct {
	ID          string            `json:"id,omitempty"`
	Name        string            `json:"name"` // the group's name, not a tag
	Description string            `json:"description,omitempty"`
	VPC         string            `json:"vpc"`
	Tags        map[string]string `json:"tags,omitempty"`
}

// RouteTableSpec is a route table of a topology.
type RouteTableSpec struct {
	ID      string            `json:"id,omitempty"`
	Name    string            `json:"name,omitempty"`
	VPC     string            `json:"vpc"`
	Main    bool              `json:"main,omitempty"`
	Subnets []string          `json:"subnets,omitempty"`
	Tags    map[string]string `json:"tags,omitempty"`
}

// InstanceSpec is an instance of a topology, with its primary interface.
type InstanceSpec struct {
	ID             string            `json:"id,omitempty"`
	Name           string            `json:"name,omitempty"`
	Type           string            `json:"type"`
	Subnet         string            `json:"subnet"`
	PrivateIP      string            `json:"privateIp,omitempty"`
	SecurityGroups []string          `json:"securityGroups,omitempty"`
	Tags           map[string]string `json:"tags,omitempty"`
}

const topologyImage = "ami-00000000000000001"

// names resolves references of one kind.
type names[K ~string] map[string]K

// add enters a resource under its id and its name, and returns the id.
func (n names[K]) add(s *state, k kind, id, name string) (K, error) {
	if id == "" {
		id = s.newID(k.prefix)
	}
	if err := k.check(id); err != nil {
		return "", err
	}
	for _, key := range []string{id, name} {
		if _, taken := n[key]; taken && key != "" {
			return "", fmt.Errorf("%q is used twice", key)
		}
	}
	for _, key := range []string{id, name} {
		if key != "" {
			n[key] = K(id)
			s.journal.record(func() { delete(n, key) })
		}
	}
	return K(id), nil
}

func (n names[K]) find(ref string) (K, error) {
	id, ok := n[ref]
	if !ok {
		return "", fmt.Errorf("reference to unknown %q", ref)
	}
	return id, nil
}

// seeder turns specs into rows and knows the names that specs may use.
type seeder struct {
	*state
	vpcNames    names[VPCID]
	subnetNames names[SubnetID]
	groupNames  map[VPCID]names[GroupID]
	tableNames  names[RouteTableID]
	hostNames   names[InstanceID]
}

func (s *state) seedFrom(t Topology, now time.Time) error {
	s.region, s.owner = t.Region, t.Account
	if s.region == "" {
		s.region = "us-east-1"
	}
	if s.owner == "" {
		s.owner = "123456789012"
	}
	if !regexp.MustCompile(`^[a-z]+(-[a-z]+)+-[0-9]+$`).MatchString(s.region) {
		return fmt.Errorf("region %q is malformed", s.region)
	}
	if !regexp.MustCompile(`^[0-9]{12}$`).MatchString(s.owner) {
		return fmt.Errorf("account %q does not have twelve digits", s.owner)
	}
	d := &seeder{
		state: s, vpcNames: names[VPCID]{}, subnetNames: names[SubnetID]{}, groupNames: map[VPCID]names[GroupID]{},
		tableNames: names[RouteTableID]{}, hostNames: names[InstanceID]{},
	}
	s.seeder = d
	for i, spec := range t.VPCs {
		if err := d.vpc(spec); err != nil {
			return fmt.Errorf("vpc %d: %w", i, err)
		}
	}
	for i, spec := range t.Subnets {
		if err := d.subnet(spec); err != nil {
			return fmt.Errorf("subnet %d: %w", i, err)
		}
	}
	for i, spec := range t.SecurityGroups {
		if err := d.group(spec); err != nil {
			return fmt.Errorf("security group %d: %w", i, err)
		}
	}
	for i, spec := range t.RouteTables {
		if err := d.routeTable(spec); err != nil {
			return fmt.Errorf("route table %d: %w", i, err)
		}
	}
	if err := d.defaults(); err != nil {
		return err
	}
	for i, spec := range t.Instances {
		if _, err := d.instance(spec, now); err != nil {
			return fmt.Errorf("instance %d: %w", i, err)
		}
	}
	return nil
}

// specTags checks the tags of a spec and adds its name.
func specTags(tags map[string]string, name string) ([]Tag, error) {
	all := tagsFromMap(tags)
	if err := checkTags(all); err != nil {
		return nil, err
	}
	if name != "" {
		all = append([]Tag{{Key: "Name", Value: name}}, all...) // an explicit Name tag wins
	}
	merged, err := mergeTags(nil, all)
	if err != nil {
		return nil, err
	}
	return merged, nil
}

func checkCIDR(cidr netip.Prefix) error {
	if !cidr.IsValid() || !cidr.Addr().Is4() || cidr != cidr.Masked() || cidr.Bits() < 16 || cidr.Bits() > 28 {
		return fmt.Errorf("%s is not an IPv4 block of size /16 to /28", cidr)
	}
	return nil
}

func (d *seeder) vpc(spec VPCSpec) error {
	if len(spec.CIDRs) == 0 {
		return errors.New("no cidrs")
	}
	for i, cidr := range spec.CIDRs {
		if err := checkCIDR(cidr); err != nil {
			return err
		}
		if slices.ContainsFunc(spec.CIDRs[:i], cidr.Overlaps) {
			return fmt.Errorf("%s overlaps another block", cidr)
		}
	}
	tags, err := specTags(spec.Tags, spec.Name)
	if err != nil {
		return err
	}
	id, err := d.vpcNames.add(d.state, kindVPC(), spec.ID, spec.Name)
	if err != nil {
		return err
	}
	d.groupNames[id] = names[GroupID]{}
	d.vpcs.put(id, VPC{ID: id, CIDRs: slices.Clone(spec.CIDRs), Tags: tags})
	return nil
}

func (d *seeder) subnet(spec SubnetSpec) error {
	vpcID, err := d.vpcNames.find(spec.VPC)
	if err != nil {
		return err
	}
	if err := checkCIDR(spec.CIDR); err != nil {
		return err
	}
	vpc, _ := d.vpcs.get(vpcID)
	if !slices.ContainsFunc(vpc.CIDRs, func(c netip.Prefix) bool { return c.Bits() <= spec.CIDR.Bits() && c.Contains(spec.CIDR.Addr()) }) {
		return fmt.Errorf("%s is not inside the VPC", spec.CIDR)
	}
	for _, other := range d.subnets.all() {
		if other.VPC == vpcID && other.CIDR.Overlaps(spec.CIDR) {
			return fmt.Errorf("%s overlaps %s", spec.CIDR, other.CIDR)
		}
	}
	if len(spec.Zone) != len(d.region)+1 || spec.Zone[:len(d.region)] != d.region || spec.Zone[len(d.region)] < 'a' || spec.Zone[len(d.region)] > 'z' {
		return fmt.Errorf("zone %q is not %s and a letter", spec.Zone, d.region)
	}
	tags, err := specTags(spec.Tags, spec.Name)
	if err != nil {
		return err
	}
	id, err := d.subnetNames.add(d.state, kindSubnet(), spec.ID, spec.Name)
	if err != nil {
		return err
	}
	d.used[id] = make(map[netip.Addr]ENIID)
	d.subnets.put(id, Subnet{
		ID: id, VPC: vpcID, Zone: spec.Zone, ZoneID: zoneID(d.region, spec.Zone), CIDR: spec.CIDR, Tags: tags,
		Free: int(subnetSize(spec.CIDR)) - reservedFirst - reservedLast,
	})
	return nil
}

// zoneID makes ids such as use1-az1 out of us-east-1a.
func zoneID(region, zone string) string {
	id := ""
	for _, part := range regexp.MustCompile(`[a-z]+|[0-9]+`).FindAllString(region, -1) {
		switch {
		case id == "":
			id = part
		default:
			id += part[:1]
		}
	}
	return fmt.Sprintf("%s-az%d", id, zone[len(zone)-1]-'a'+1)
}

func (d *seeder) group(spec SecurityGroupSpec) error {
	if spec.Name == "" {
		return errors.New("no name")
	}
	vpcID, err := d.vpcNames.find(spec.VPC)
	if err != nil {
		return err
	}
	tags, err := specTags(spec.Tags, "")
	if err != nil {
		return err
	}
	if spec.Description == "" {
		spec.Description = spec.Name
	}
	id, err := d.groupNames[vpcID].add(d.state, kindGroup(), spec.ID, spec.Name)
	if err != nil {
		return err
	}
	if _, taken := d.groups.get(id); taken {
		return fmt.Errorf("%q is used twice", id)
	}
	d.groups.put(id, SecurityGroup{ID: id, Name: spec.Name, Description: spec.Description, VPC: vpcID, Tags: tags})
	return nil
}

func (d *seeder) routeTable(spec RouteTableSpec) error {
	vpcID, err := d.vpcNames.find(spec.VPC)
	if err != nil {
		return err
	}
	var subnets []SubnetID
	for _, ref := range spec.Subnets {
		id, err := d.subnetNames.find(ref)
		if err != nil {
			return err
		}
		if subnet, _ := d.subnets.get(id); subnet.VPC != vpcID {
			return fmt.Errorf("subnet %s is in another VPC", id)
		}
		subnets = append(subnets, id)
	}
	for _, other := range d.routeTables.all() {
		if other.VPC == vpcID && other.Main && spec.Main {
			return errors.New("second main table of the VPC")
		}
		for _, id := range subnets {
			if slices.Contains(other.Subnets, id) {
				return fmt.Errorf("subnet %s is in two tables", id)
			}
		}
	}
	tags, err := specTags(spec.Tags, spec.Name)
	if err != nil {
		return err
	}
	id, err := d.tableNames.add(d.state, kindRouteTable(), spec.ID, spec.Name)
	if err != nil {
		return err
	}
	d.routeTables.put(id, RouteTable{ID: id, VPC: vpcID, Main: spec.Main, Subnets: subnets, Tags: tags})
	return nil
}

// defaults adds what every VPC has.
func (d *seeder) defaults() error {
	for _, vpc := range d.vpcs.all() {
		if _, err := d.groupNames[vpc.ID].find("default"); err != nil {
			spec := SecurityGroupSpec{Name: "default", Description: "default VPC security group", VPC: string(vpc.ID)}
			if err := d.group(spec); err != nil {
				return err
			}
		}
		hasMain := slices.ContainsFunc(d.routeTables.all(), func(t RouteTable) bool { return t.VPC == vpc.ID && t.Main })
		if !hasMain {
			if err := d.routeTable(RouteTableSpec{VPC: string(vpc.ID), Main: true}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *seeder) instance(spec InstanceSpec, now time.Time) (InstanceID, error) {
	subnetID, err := d.subnetNames.find(spec.Subnet)
	if err != nil {
		return "", err
	}
	if _, ok := d.limits.Lookup(spec.Type); !ok {
		return "", fmt.Errorf("unknown instance type %q", spec.Type)
	}
	subnet, _ := d.subnets.get(subnetID)
	var groups []GroupID
	for _, ref := range spec.SecurityGroups {
		id, err := d.groupNames[subnet.VPC].find(ref)
		if err != nil {
			return "", err
		}
		groups = append(groups, id)
	}
	tags, err := specTags(spec.Tags, spec.Name)
	if err != nil {
		return "", err
	}
	id, err := d.hostNames.add(d.state, kindInstance(), spec.ID, spec.Name)
	if err != nil {
		return "", err
	}
	zero := 0
	_, refused := d.launchOne(launch{
		image: topologyImage, typ: spec.Type, instanceTags: tags, reservation: d.newID("r-"), id: id,
		interfaces: []LaunchInterface{{
			DeviceIndex: &zero, SubnetID: subnetID, SecurityGroups: groups, AddressSpec: AddressSpec{PrivateIPAddress: spec.PrivateIP},
		}},
	}, 0, now)
	if refused != nil {
		return "", refused
	}
	return id, nil
}

// Launch runs one more instance as a topology would describe it. EC2 has no
// such action: it is for those who set up a test.
func (a *Account) Launch(spec InstanceSpec) (Instance, error) {
	var instance Instance
	var problem error
	err := a.mutate(false, func(s *state, now time.Time) *Error {
		id, err := s.seeder.instance(spec, now)
		if err != nil {
			problem = err
			return invalid("%s", err)
		}
		instance, _ = s.instances.get(id)
		return nil
	})
	if err != nil {
		return Instance{}, problem
	}
	return instance, nil
}
